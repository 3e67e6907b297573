// Asks the kernel to read pages of a mapped file ahead of their use.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "thermocline/page_advice.h"

namespace thermocline {

int64_t will_need(const uint8_t* base, int64_t start, int64_t end, int64_t piece_bytes) {
    const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<int64_t>(base);
    const int64_t last = address + end;
    int64_t from = (address + start) / page * page;
    const int64_t first = from;
    const int64_t piece = std::max(piece_bytes / page, int64_t{1}) * page;
    for (; from < last; from += piece) {
        const int64_t length = std::min(piece, last - from);
        if (madvise(reinterpret_cast<void*>(from), static_cast<size_t>(length), MADV_WILLNEED) != 0)
            return -errno;
    }
    return last - first;
}

int64_t resident_pages(const uint8_t* base, const int64_t* offsets, int64_t count) {
    const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
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
