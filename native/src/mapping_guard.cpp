// Keeps this process alive when a mapped file shrinks or its disk fails.
#include "thermocline/mapping_guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

namespace thermocline {

// A guarded mapping, as the handler finds it. Ranges are used again and never freed: a handler may be looking.
struct Range {
    std::atomic<uintptr_t> begin{UINTPTR_MAX}, end{0};
    std::atomic<bool> is_lost{false};
    Range* next = nullptr;
};

namespace {

std::atomic<Range*> ranges{nullptr};
std::mutex ranges_mutex;
struct sigaction previous {};
uintptr_t page_bytes = 4096;

Range* find(uintptr_t address) {
    for (Range* range = ranges.load(std::memory_order_acquire); range != nullptr; range = range->next)
        if (address >= range->begin.load(std::memory_order_acquire) &&
            address < range->end.load(std::memory_order_acquire))
            return range;
    return nullptr;
}

// Zeros from the page on to the end of the mapping: a file that shrank has nothing there, and a mapping with a zero
// page here and there could need more areas of memory than a process may have. What was read counts for nothing anyway.
bool put_zeros(Range& range, uintptr_t address) {
    range.is_lost.store(true, std::memory_order_release);
    const uintptr_t from = address & ~(page_bytes - 1);
    const uintptr_t bytes = range.end.load(std::memory_order_acquire) - from;
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap(reinterpret_cast<void*>(from), bytes, PROT_READ, flags, -1, 0) != MAP_FAILED;
}

void pass_on(int signal, siginfo_t* info, void* context) {
    if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
    const bool was_sent = info->si_code <= 0;
    if (previous.sa_handler == SIG_IGN && was_sent) return;
    if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
    // A fault comes again when this returns; a signal that was sent must be sent again.
    if (was_sent) raise(signal);
}

// Only async-signal-safe calls; mmap is a plain system call on Linux.
void on_bus_error(int signal, siginfo_t* info, void* context) {
    const int saved_errno = errno;
    const bool is_fault = info->si_code == BUS_ADRERR || info->si_code == BUS_MCEERR_AR;
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    Range* const range = is_fault ? find(address) : nullptr;
    if (range == nullptr || !put_zeros(*range, address)) pass_on(signal, info, context);
    errno = saved_errno;
}

void install() {
    page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &previous) != 0) throw std::system_error(errno, std::generic_category());
}

Range* take_range(uintptr_t begin, uintptr_t end) {
    const std::lock_guard lock(ranges_mutex);
    static std::once_flag installed;
    std::call_once(installed, install);
    Range* range = ranges.load(std::memory_order_relaxed);
    while (range != nullptr && range->begin.load(std::memory_order_relaxed) != UINTPTR_MAX) range = range->next;
    const bool is_new = range == nullptr;
    if (is_new) range = new Range;
    range->is_lost.store(false, std::memory_order_relaxed);
    range->end.store(end, std::memory_order_release);
    range->begin.store(begin, std::memory_order_release);
    if (is_new) {
        range->next = ranges.load(std::memory_order_relaxed);
        ranges.store(range, std::memory_order_release);
    }
    return range;
}

}  // namespace

GuardedMap::GuardedMap(const uint8_t* data, int64_t bytes, int fd) {
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (fd_ < 0 || fstat(fd_, &first_) != 0) {
        const int error = errno;
        if (fd_ >= 0) close(fd_);
        throw std::system_error(error, std::generic_category());
    }
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    try {
        // The last page is mapped whole.
        range_ = take_range(begin, (begin + static_cast<uintptr_t>(bytes) + page - 1) & ~(page - 1));
    } catch (...) {
        close(fd_);
        throw;
    }
    // Shorter than what was mapped a moment ago.
    if (first_.st_size != bytes) first_.st_size = bytes;
}

FileChange GuardedMap::change() {
    const std::lock_guard lock(mutex_);
    if (range_ == nullptr) return FileChange::kNone;
    struct ::stat now {};
    if (range_->is_lost.load(std::memory_order_acquire) || fstat(fd_, &now) != 0) return FileChange::kUnreadable;
    if (now.st_size != first_.st_size) return FileChange::kResized;
    const bool is_as_old = now.st_mtim.tv_sec == first_.st_mtim.tv_sec && now.st_mtim.tv_nsec == first_.st_mtim.tv_nsec;
    return is_as_old ? FileChange::kNone : FileChange::kRewritten;
}

void GuardedMap::release() {
    const std::lock_guard lock(mutex_);
    if (range_ == nullptr) return;
    {
        const std::lock_guard all(ranges_mutex);
        range_->begin.store(UINTPTR_MAX, std::memory_order_release);
    }
    range_ = nullptr;
    close(fd_);
    fd_ = -1;
}

}  // namespace thermocline
