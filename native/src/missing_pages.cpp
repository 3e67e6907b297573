#include "missing_pages.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "thermocline/page_advice.h"

namespace thermocline {
namespace {

// What this process has in view, page by page, also of files of other users, of which mincore does not tell.
class PageMap {
   public:
    PageMap() : fd_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)), page_bytes_(sysconf(_SC_PAGESIZE)) {}

    // Whether a page is in view, and so in memory; where the system shows nothing, whether it is in memory.
    bool has(const uint8_t* at) const {
        uint64_t entry = 0;
        const auto place = static_cast<off_t>(reinterpret_cast<uintptr_t>(at) / page_bytes_ * sizeof entry);
        if (fd_ >= 0 && pread(fd_, &entry, sizeof entry, place) == sizeof entry) return entry >> 63 != 0;
        const int64_t here = 0;
        return resident_pages(at, &here, 1) != 0;
    }

   private:
    int fd_;
    uintptr_t page_bytes_;
};

bool is_present(const uint8_t* at) {
    static const PageMap map;
    return map.has(at);
}

bool is_present(const Weight& weight) {
    return weight.data == nullptr || is_present(weight.data + weight.rows * weight.row_bytes - 1);
}

}  // namespace

void put_present_first(std::vector<ExpertGroup>& groups) {
    std::stable_partition(groups.begin(), groups.end(), [](const ExpertGroup& group) {
        const ExpertWeights& w = group.weights;
        return is_present(w.gate) && is_present(w.up) && is_present(w.down);
    });
}

void ask_for(const uint8_t* from, int64_t bytes) {
    if (bytes <= 0 || (is_present(from) && is_present(from + bytes - 1))) return;
    ask_for_pages(from, 0, bytes);
}

}  // namespace thermocline
