#include "thermocline/roofline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

namespace thermocline {

// Whole lines into sums of their own, and nothing asked for ahead: a core's own prefetching keeps up with one long run
// of bytes, while 64 bits at a time stayed below what memory gives (22 of 39 GB/s on one Zen 5 core).
uint64_t read_all(const Compute& compute, const uint8_t* data, int64_t bytes) {
    typedef uint64_t Line __attribute__((vector_size(64)));
    constexpr int64_t kItem = 1 << 22, kLine = sizeof(Line), kSums = 4;
    std::atomic<uint64_t> checksum{0};
    compute.pool.for_each((bytes + kItem - 1) / kItem, [&](int64_t item) {
        const uint8_t* at = data + item * kItem;
        const int64_t count = std::min(kItem, bytes - item * kItem);
        Line sums[kSums] = {};
        int64_t i = 0;
        for (; i + kLine * kSums <= count; i += kLine * kSums) {
            Line lines[kSums];
            std::memcpy(lines, at + i, sizeof lines);
            for (int n = 0; n < kSums; ++n) sums[n] ^= lines[n];
        }
        uint64_t all = 0;
        for (; i < count; ++i) all ^= at[i];
        for (const Line& sum : sums)
            for (int word = 0; word < 8; ++word) all ^= sum[word];
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
    const Ahead nothing[kStrips];
    compute.pool.for_each(compute.pool.threads(), [&](int64_t) {
        auto panel = std::make_unique<QuantPanel>();
        std::memset(panel->q, 7, sizeof panel->q);
        std::fill_n(panel->largest, kStrips, 15);
        std::fill_n(&panel->scale[0][0][0], sizeof panel->scale / 4, 1e-3f);
        std::fill_n(&panel->minimum[0][0][0], sizeof panel->minimum / 4, 1e-3f);
        std::vector<float> sums(kTokens * kPanelRows);
        for (int64_t round = 0; round < rounds; ++round)
            compute.set.gemm->multiply(*panel, form, kSpan, 0, bases.data(), layout, kTokens, true, nothing,
                                       sums.data());
    });
    return compute.pool.threads() * rounds * kTokens * kSpan * kPanelRows;
}

}  // namespace thermocline
