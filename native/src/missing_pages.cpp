#include "missing_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "thermocline/page_advice.h"

namespace thermocline {
namespace {

// Of linux/fs.h, which older systems have without it: PAGEMAP_SCAN, and what it takes (Linux 6.7).
struct ScannedRegion {
    uint64_t start, end, categories;
};
struct PageScan {
    uint64_t size, flags, start, end, walk_end, regions, num_regions, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr unsigned long kScan = _IOWR('f', 16, PageScan);
constexpr uint64_t kIsPresent = 1 << 3;

// What this process has in view, page by page, also of files of other users, of which mincore does not tell.
class PageMap {
   public:
    PageMap() : fd_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)), page_bytes_(sysconf(_SC_PAGESIZE)) {}

    // Whether all pages of some bytes are in view, and so in memory; where the system shows nothing, whether the first
    // and the last are in memory.
    bool has(const uint8_t* from, int64_t bytes) const {
        const auto first = reinterpret_cast<uintptr_t>(from) / page_bytes_;
        const auto end = (reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes) + page_bytes_ - 1) / page_bytes_;
        if (fd_ >= 0) {
            const int found = can_scan_.load(std::memory_order_relaxed) ? scan(first, end) : -1;
            if (found >= 0) return found == 0;
            can_scan_.store(false, std::memory_order_relaxed);
            const int lacks = read(first, end);
            if (lacks >= 0) return lacks == 0;
        }
        const int64_t ends[] = {0, bytes - 1};
        const int64_t resident = resident_pages(from, ends, 2);
        return resident < 0 || resident == 2;
    }

   private:
    // How many regions of missing pages there are, at most one; -1 where the system does not tell.
    int scan(uintptr_t first, uintptr_t end) const {
        ScannedRegion region;
        PageScan of{};
        of.size = sizeof of;
        of.start = first * page_bytes_;
        of.end = end * page_bytes_;
        of.regions = reinterpret_cast<uintptr_t>(&region);
        of.num_regions = 1;
        of.category_inverted = of.category_mask = of.return_mask = kIsPresent;
        return ioctl(fd_, kScan, &of);
    }

    // 1 if a page is missing, else 0; -1 where the system does not tell.
    int read(uintptr_t first, uintptr_t end) const {
        std::array<uint64_t, 512> entries;
        while (first < end) {
            const auto count = std::min(end - first, entries.size());
            const auto size = static_cast<ssize_t>(count * sizeof entries[0]);
            if (pread(fd_, entries.data(), count * sizeof entries[0], static_cast<off_t>(first * sizeof entries[0])) != size)
                return -1;
            for (size_t i = 0; i < count; ++i)
                if (entries[i] >> 63 == 0) return 1;
            first += count;
        }
        return 0;
    }

    int fd_;
    uintptr_t page_bytes_;
    mutable std::atomic<bool> can_scan_{true};
};

bool is_present(const uint8_t* from, int64_t bytes) {
    static const PageMap map;
    return map.has(from, bytes);
}

bool is_present(const Weight& weight) {
    return weight.data == nullptr || is_present(weight.data, weight.rows * weight.row_bytes);
}

}  // namespace

void put_present_first(std::vector<ExpertGroup>& groups) {
    for (ExpertGroup& group : groups) {
        const ExpertWeights& w = group.weights;
        group.may_be_missing = !(is_present(w.gate) && is_present(w.up) && is_present(w.down));
    }
    std::stable_partition(groups.begin(), groups.end(), [](const ExpertGroup& group) { return !group.may_be_missing; });
}

void ask_for(const uint8_t* from, int64_t bytes) {
    if (bytes <= 0 || is_present(from, bytes)) return;
    ask_for_pages(from, 0, bytes);
}

}  // namespace thermocline
