// Brings pages of a mapped file into memory and lets them go.
#include "thermocline/page_advice.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

namespace thermocline {

namespace {

// Older headers lack them; an older kernel answers EINVAL.
constexpr int kPageOut = 21, kPopulateRead = 22;
constexpr int64_t kBlockBytes = int64_t{2} << 20;

struct Pages {
    int64_t from, length;

    // Gives advice; returns the bytes, or -errno. may_be_unknown: an older kernel does nothing, and that is fine.
    [[nodiscard]] int64_t advise(int advice, bool may_be_unknown = false) const {
        if (length == 0 || madvise(reinterpret_cast<void*>(from), static_cast<size_t>(length), advice) == 0) return length;
        return errno == EINVAL && may_be_unknown ? length : -errno;
    }
};

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

Pages pages_inside(const uint8_t* base, int64_t start, int64_t end) {
    const int64_t page = page_bytes(), address = reinterpret_cast<int64_t>(base);
    const int64_t from = (address + start + page - 1) / page * page;
    return {from, std::max((address + end) / page * page - from, int64_t{0})};
}

Pages pages_around(const uint8_t* base, int64_t start, int64_t end) {
    const int64_t page = page_bytes(), address = reinterpret_cast<int64_t>(base);
    const int64_t from = (address + start) / page * page;
    const int64_t last = (address + end + page - 1) / page * page;
    return {from, last - from};
}

long waits_of_thread() {
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    return used.ru_majflt;
}

}  // namespace

int64_t ask_for_pages(const uint8_t* base, int64_t start, int64_t end) {
    return pages_around(base, start, end).advise(MADV_WILLNEED);
}

int64_t fetch_pages(const uint8_t* base, int64_t start, int64_t end) {
    const Pages pages = pages_around(base, start, end);
    // First all requests at once, then the wait: populating alone asks for one small window after another.
    const int64_t asked = pages.advise(MADV_WILLNEED);
    return asked < 0 ? asked : pages.advise(kPopulateRead, true);
}

int64_t fetch_blocks(const uint8_t* base, int64_t start, int64_t end) {
    static std::atomic<bool> come_in_blocks{true};
    if (!come_in_blocks.load(std::memory_order_relaxed)) return fetch_pages(base, start, end);
    const Pages pages = pages_around(base, start, end);
    const long before = waits_of_thread();
    const int64_t done = pages.advise(kPopulateRead);
    if (done == -EINVAL) return fetch_pages(base, start, end);
    // One wait for each block that the bytes touch, or two, if blocks come in pairs and by two threads.
    if (waits_of_thread() - before > 2 * (pages.length / kBlockBytes + 2)) come_in_blocks.store(false, std::memory_order_relaxed);
    return done;
}

int64_t allow_blocks(const uint8_t* base, int64_t start, int64_t end) {
    return pages_around(base, start, end).advise(MADV_HUGEPAGE);
}

int64_t release_pages(const uint8_t* base, int64_t start, int64_t end) {
    return pages_inside(base, start, end).advise(kPageOut, true);
}

int64_t unmap_pages(const uint8_t* base, int64_t start, int64_t end) {
    return pages_inside(base, start, end).advise(MADV_DONTNEED);
}

int64_t stop_read_ahead(const uint8_t* base, int64_t start, int64_t end) {
    return pages_around(base, start, end).advise(MADV_RANDOM);
}

int64_t resident_pages(const uint8_t* base, const int64_t* offsets, int64_t count) {
    const int64_t page = page_bytes();
    int64_t resident = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = (reinterpret_cast<int64_t>(base) + offsets[i]) / page * page;
        unsigned char state = 0;
        if (mincore(reinterpret_cast<void*>(from), 1, &state) != 0) return -errno;
        resident += state & 1;
    }
    return resident;
}

int64_t pages_read_at_once(const uint8_t* base, const int64_t* offsets, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        const long before = waits_of_thread();
        const int64_t read = pages_around(base, offsets[i], offsets[i] + 1).advise(kPopulateRead);
        if (read < 0) return read;
        found += waits_of_thread() == before;
    }
    return found;
}

}  // namespace thermocline
