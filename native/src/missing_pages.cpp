#include "missing_pages.h"

#include <algorithm>

#include "thermocline/page_advice.h"

namespace thermocline {
namespace {

// True also where the kernel does not tell.
bool is_present(const uint8_t* at) {
    const int64_t here = 0;
    return resident_pages(at, &here, 1) != 0;
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
