// Token-expert pairs sorted by expert, as the kernels of experts want them.
#pragma once

#include <cstdint>
#include <vector>

#include "thermocline/layer.h"
#include "thermocline/matmul.h"

namespace thermocline {

// The matrices of some experts, or of slots that hold experts.
struct ExpertStacks {
    int64_t count = 0;
    StackedExperts experts;
};

// The pairs (token, choice) with a place in `stacks`, sorted by it, then by token and choice.
class ExpertGroups {
   public:
    // places: [tokens, chosen], below zero for pairs that are left out. False where a place is beyond the stacks.
    bool sort(const ExpertStacks& stacks, int64_t tokens, int64_t chosen, const int32_t* places, const float* weights) {
        groups_.clear();
        next_.assign(static_cast<size_t>(stacks.count) + 1, 0);
        pair_of_.assign(static_cast<size_t>(tokens * chosen), -1);
        int64_t found = 0;
        for (size_t pair = 0; pair < pair_of_.size(); ++pair) {
            if (places[pair] < 0) continue;
            if (places[pair] >= stacks.count) return false;
            ++next_[static_cast<size_t>(places[pair]) + 1];
            ++found;
        }
        for (size_t place = 0; place + 1 < next_.size(); ++place) {
            const int64_t count = next_[place + 1];
            if (count > 0) {
                const auto at = static_cast<int64_t>(place);
                groups_.push_back({stacks.experts[at], next_[place], count});
            }
            next_[place + 1] += next_[place];
        }
        rows_.resize(static_cast<size_t>(found));
        scale_.resize(rows_.size());
        for (size_t pair = 0; pair < pair_of_.size(); ++pair) {
            if (places[pair] < 0) continue;
            const auto to = static_cast<size_t>(next_[static_cast<size_t>(places[pair])]++);
            rows_[to] = static_cast<int32_t>(static_cast<int64_t>(pair) / chosen);
            scale_[to] = weights[pair];
            pair_of_[pair] = static_cast<int32_t>(to);
        }
        return true;
    }

    std::vector<ExpertGroup>& groups() { return groups_; }

    int64_t pairs() const { return static_cast<int64_t>(rows_.size()); }
    // [tokens, chosen], which of the sorted pairs each is, or -1.
    const int32_t* pair_of() const { return pair_of_.data(); }
    // For x [tokens, hidden]; valid until the next `sort`.
    ExpertWork work(const float* x, int64_t tokens, int64_t hidden) const {
        return {groups_.data(), static_cast<int64_t>(groups_.size()), x, tokens, hidden, rows_.data(), scale_.data(),
                pairs()};
    }

   private:
    std::vector<ExpertGroup> groups_;
    std::vector<int64_t> next_;
    std::vector<int32_t> rows_, pair_of_;
    std::vector<float> scale_;
};

}  // namespace thermocline
