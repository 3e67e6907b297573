// Looks at a socket without giving up the processor: waking up takes longer than a small request.
#include "thermocline/frames.h"

#include <sys/socket.h>

#include <cerrno>
#include <chrono>

namespace thermocline {

int64_t receive_soon(int fd, uint8_t* buffer, int64_t capacity, int64_t spin_ns) {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::nanoseconds(spin_ns);
    while (true) {
        const ssize_t count = recv(fd, buffer, static_cast<size_t>(capacity), MSG_DONTWAIT);
        if (count >= 0) return count;
        if (errno != EAGAIN && errno != EINTR) return -errno;
        if (Clock::now() >= end) return -EAGAIN;
    }
}

}  // namespace thermocline
