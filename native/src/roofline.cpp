#include "thermocline/roofline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

namespace thermocline {

uint64_t read_all(const Compute& compute, const uint8_t* data, int64_t bytes) {
    constexpr int64_t kItem = 1 << 20, kLine = 64, kAhead = 2048;
    std::atomic<uint64_t> checksum{0};
    compute.pool.for_each((bytes + kItem - 1) / kItem, [&](int64_t item) {
        const uint8_t* at = data + item * kItem;
        const int64_t count = std::min(kItem, bytes - item * kItem);
        uint64_t sums[8] = {};
        int64_t i = 0;
        for (; i + kLine <= count; i += kLine) {
            if (i + kAhead < count) __builtin_prefetch(at + i + kAhead, 0, 2);
            uint64_t words[8];
            std::memcpy(words, at + i, kLine);
            for (int w = 0; w < 8; ++w) sums[w] ^= words[w];
        }
        for (; i < count; ++i) sums[0] ^= at[i];
        uint64_t all = 0;
        for (const uint64_t sum : sums) all ^= sum;
        checksum.fetch_xor(all, std::memory_order_relaxed);
    });
    return checksum.load();
}

int64_t multiply_in_cache(const Compute& compute, int64_t rounds) {
    constexpr int64_t kTokens = 24;
    const QuantForm form{32, 0, true, true};
    const ActivationLayout layout = ActivationLayout::of(kSpan, form);
    const std::vector<float> x(kSpan, 0.5f);
    std::vector<uint8_t> activations(static_cast<size_t>(kTokens * layout.row_bytes));
    std::vector<const uint8_t*> bases;
    for (int64_t t = 0; t < kTokens; ++t) {
        bases.push_back(activations.data() + t * layout.row_bytes);
        compute.set.gemm->quantize(x.data(), kSpan, form, layout, activations.data() + t * layout.row_bytes);
    }
    compute.pool.for_each(compute.pool.threads(), [&](int64_t) {
        auto panel = std::make_unique<QuantPanel>();
        std::memset(panel->q, 7, sizeof panel->q);
        std::fill_n(panel->largest, kStrips, 15);
        std::fill_n(&panel->scale[0][0][0], sizeof panel->scale / 4, 1e-3f);
        std::fill_n(&panel->minimum[0][0][0], sizeof panel->minimum / 4, 1e-3f);
        std::vector<float> sums(kTokens * kPanelRows);
        for (int64_t round = 0; round < rounds; ++round)
            compute.set.gemm->multiply(*panel, form, kSpan, 0, bases.data(), layout, kTokens, true, sums.data());
    });
    return compute.pool.threads() * rounds * kTokens * kSpan * kPanelRows;
}

}  // namespace thermocline
