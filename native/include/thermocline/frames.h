// Looks at a socket for the frames of expert workers.
#pragma once

#include <cstdint>

namespace thermocline {

// Bytes that came within `spin_ns` nanoseconds of looking, 0 at the stream's end, or -errno: -EAGAIN where none did.
int64_t receive_soon(int fd, uint8_t* buffer, int64_t capacity, int64_t spin_ns);

}  // namespace thermocline
