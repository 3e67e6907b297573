// Brings pages of a mapped file into memory and lets them go.
#include "thermocline/page_advice.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace thermocline {

namespace {

// Older headers lack them; an older kernel answers EINVAL.
constexpr int kPageOut = 21, kPopulateRead = 22;

struct Pages {
    int64_t from, length;

    [[nodiscard]] int advise(int advice) const {
        if (length == 0) return 0;
        return madvise(reinterpret_cast<void*>(from), static_cast<size_t>(length), advice) == 0 ? 0 : errno;
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

}  // namespace

int64_t ask_for_pages(const uint8_t* base, int64_t start, int64_t end) {
    const Pages pages = pages_around(base, start, end);
    const int error = pages.advise(MADV_WILLNEED);
    return error == 0 ? pages.length : -error;
}

int64_t fetch_pages(const uint8_t* base, int64_t start, int64_t end) {
    const Pages pages = pages_around(base, start, end);
    // First all requests at once, then the wait: populating alone asks for one small window after another.
    if (const int error = pages.advise(MADV_WILLNEED)) return -error;
    const int error = pages.advise(kPopulateRead);
    return error == 0 || error == EINVAL ? pages.length : -error;
}

int64_t release_pages(const uint8_t* base, int64_t start, int64_t end) {
    const Pages pages = pages_inside(base, start, end);
    const int error = pages.advise(kPageOut);
    return error == 0 || error == EINVAL ? pages.length : -error;
}

int64_t unmap_pages(const uint8_t* base, int64_t start, int64_t end) {
    const Pages pages = pages_inside(base, start, end);
    const int error = pages.advise(MADV_DONTNEED);
    return error == 0 ? pages.length : -error;
}

int64_t stop_read_ahead(const uint8_t* base, int64_t start, int64_t end) {
    const Pages pages = pages_around(base, start, end);
    const int error = pages.advise(MADV_RANDOM);
    return error == 0 ? pages.length : -error;
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

}  // namespace thermocline
