// What each pair's down product is multiplied by: its routing weight, and the scale of its expert's down matrix.
#pragma once

#include <algorithm>
#include <vector>

#include "thermocline/matmul.h"

namespace thermocline {

class PairScales {
   public:
    explicit PairScales(const ExpertWork& work) : scales_(work.scale) {
        const ExpertGroup* end = work.groups + work.num_groups;
        const auto is_scaled = [](const ExpertGroup& group) { return group.weights.down.scale != 1.0f; };
        if (std::none_of(work.groups, end, is_scaled)) return;
        own_.assign(work.scale, work.scale + work.pairs);
        for (const ExpertGroup* group = work.groups; group != end; ++group)
            for (int64_t pair = group->first; pair < group->first + group->count; ++pair)
                own_[static_cast<size_t>(pair)] *= group->weights.down.scale;
        scales_ = own_.data();
    }

    PairScales(const PairScales&) = delete;
    PairScales& operator=(const PairScales&) = delete;

    float operator[](int64_t pair) const { return scales_[pair]; }
    const float* data() const { return scales_; }

   private:
    std::vector<float> own_;
    const float* scales_;
};

}  // namespace thermocline
