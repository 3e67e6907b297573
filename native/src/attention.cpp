// Causal attention over a block cache, one (token, head) at a time in a fixed order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "thermocline/dot.h"
#include "thermocline/kernels.h"

namespace thermocline {
namespace {

struct Row {
    const int32_t* block_table;
    int64_t block_tokens;
    int64_t stride;  // floats from one slot to the next

    int64_t offset(int64_t position) const {
        const int64_t block = block_table[position / block_tokens];
        return (block * block_tokens + position % block_tokens) * stride;
    }
};

THERMOCLINE_CLONES void scores_of(const Row& row, const float* q, const float* k, int64_t head_dim,
                                  int64_t context, float scale, float* scores) {
    for (int64_t p = 0; p < context; ++p) {
        dot_tile<1, 1>(q, head_dim, k + row.offset(p), head_dim, head_dim, scores + p, 1);
        scores[p] *= scale;
    }
}

THERMOCLINE_CLONES void weighted_sum(const Row& row, const float* v, int64_t head_dim, int64_t context,
                                     const float* weights, float total, float* out) {
    for (int64_t d = 0; d < head_dim; ++d) out[d] = 0.0f;
    for (int64_t p = 0; p < context; ++p) {
        const float* value = v + row.offset(p);
        for (int64_t d = 0; d < head_dim; ++d) out[d] += weights[p] * value[d];
    }
    for (int64_t d = 0; d < head_dim; ++d) out[d] /= total;
}

// In place: exp(s - max), rounded once from double. Returns the sum, added in order in double.
float softmax_numerators(float* scores, int64_t context) {
    const double top = *std::max_element(scores, scores + context);
    double total = 0.0;
    for (int64_t p = 0; p < context; ++p) {
        scores[p] = static_cast<float>(std::exp(static_cast<double>(scores[p]) - top));
        total += scores[p];
    }
    return static_cast<float>(total);
}

}  // namespace

void attention(const AttentionShape& s, const float* q, const float* k, const float* v,
               const int32_t* block_table, const int32_t* positions, float scale, float* out) {
    const Row row{block_table, s.block_tokens, s.kv_heads * s.head_dim};
    const int64_t group = s.heads / s.kv_heads;
    std::vector<float> scores;
    for (int64_t t = 0; t < s.tokens; ++t) {
        const int64_t context = static_cast<int64_t>(positions[t]) + 1;
        scores.resize(static_cast<size_t>(context));
        for (int64_t h = 0; h < s.heads; ++h) {
            const int64_t kv_offset = h / group * s.head_dim;
            const int64_t row_offset = (t * s.heads + h) * s.head_dim;
            scores_of(row, q + row_offset, k + kv_offset, s.head_dim, context, scale, scores.data());
            const float total = softmax_numerators(scores.data(), context);
            weighted_sum(row, v + kv_offset, s.head_dim, context, scores.data(), total, out + row_offset);
        }
    }
}

}  // namespace thermocline
