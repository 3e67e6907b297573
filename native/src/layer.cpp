#include "thermocline/layer.h"

#include <vector>

#include "scratch.h"

namespace thermocline {
namespace {

// Attention and what it reads: x plus its output, [tokens, hidden].
void attend(const Compute& compute, const Dense& dense, Form form, const AttentionPart& part,
            const LayerTokens& tokens, const LayerCacheView& cache, const float* x, float* out) {
    const int64_t count = tokens.count, hidden = part.output.rows, row = part.q.rows, kv_row = part.k.rows;
    const int64_t head_dim = cache.shape.head_dim, heads = row / head_dim;
    thread_local Scratch memory;
    float* normed = memory.get<float>(count * (hidden + 2 * row + 2 * kv_row));
    float* q = normed + count * hidden;
    float* k = q + count * row;
    float* v = k + count * kv_row;
    float* attended = v + count * kv_row;

    rms_norm(dense, x, part.norm, part.epsilon, count, hidden, normed);
    const Product products[] = {{part.q, q, row}, {part.k, k, kv_row}, {part.v, v, kv_row}};
    multiply_all(compute, form, normed, count, products, 3);
    prepare_heads(dense, {q, k, v, count, heads, part.q_gain, part.k_gain, part.epsilon, tokens.cosines,
                          tokens.sines, tokens.rotary_dims, tokens.rope, cache.shape, cache.keys, cache.values,
                          tokens.slots});
    std::vector<AttentionJob> jobs;
    for (int64_t s = 0; s < tokens.sequences; ++s) {
        const int64_t first = tokens.starts[s], length = tokens.starts[s + 1] - first;
        if (length == 0) continue;
        jobs.push_back({q + first * row, tokens.positions + first, length, heads, cache.shape, cache.keys,
                        cache.values, tokens.block_tables + tokens.table_starts[s], part.scale, 0.0f, 0,
                        attended + first * row});
    }
    attention(dense, jobs.data(), static_cast<int64_t>(jobs.size()));
    const Product output{part.output, out, hidden, x};
    multiply_all(compute, form, attended, count, &output, 1);
}

// The pairs (token, slot) sorted by expert, then by token and slot.
struct Grouped {
    std::vector<ExpertGroup> groups;
    std::vector<int32_t> rows, pair_of;
    std::vector<float> scale;

    Grouped(const Layer& layer, int64_t tokens, const int32_t* ids, const float* weights)
        : rows(static_cast<size_t>(tokens * layer.router.chosen)), pair_of(rows.size()), scale(rows.size()) {
        std::vector<int64_t> next(static_cast<size_t>(layer.router.matrix.rows) + 1);
        for (size_t pair = 0; pair < rows.size(); ++pair) ++next[static_cast<size_t>(ids[pair]) + 1];
        for (size_t expert = 0; expert + 1 < next.size(); ++expert) {
            const int64_t count = next[expert + 1];
            if (count > 0) {
                const auto e = static_cast<int64_t>(expert);
                groups.push_back({{layer.gate[e], layer.up[e], layer.down[e]}, next[expert], count});
            }
            next[expert + 1] += next[expert];
        }
        for (size_t pair = 0; pair < rows.size(); ++pair) {
            const auto place = static_cast<size_t>(next[static_cast<size_t>(ids[pair])]++);
            rows[place] = static_cast<int32_t>(static_cast<int64_t>(pair) / layer.router.chosen);
            scale[place] = weights[pair];
            pair_of[pair] = static_cast<int32_t>(place);
        }
    }
};

}  // namespace

void run_layer(const Compute& compute, const Dense& dense, Form form, const Layer& layer, const LayerTokens& tokens,
               const LayerCacheView& cache, const float* x, float* out, int32_t* ids, float* weights) {
    const int64_t count = tokens.count, hidden = layer.attention.output.rows, experts = layer.router.matrix.rows;
    const auto marked = [&](LayerMark part) { compute.pool.mark(static_cast<int64_t>(part)); };
    thread_local Scratch memory;
    float* residual = memory.get<float>(count * (2 * hidden + experts));
    float* normed = residual + count * hidden;
    float* logits = normed + count * hidden;

    marked(LayerMark::Attend);
    attend(compute, dense, form, layer.attention, tokens, cache, x, residual);
    marked(LayerMark::Route);
    rms_norm(dense, residual, layer.router.norm, layer.attention.epsilon, count, hidden, normed);
    const Product routing{layer.router.matrix, logits, experts};
    multiply_all(compute, Form::Decode, normed, count, &routing, 1);
    const RouterPart& rule = layer.router;
    route_softmax(dense, {logits, count, experts, rule.chosen, rule.normalize, rule.min_sum, rule.scale, ids, weights});
    marked(LayerMark::Experts);
    const Grouped pairs(layer, count, ids, weights);
    const ExpertWork work{pairs.groups.data(), static_cast<int64_t>(pairs.groups.size()), normed, count, hidden,
                          pairs.rows.data(), pairs.scale.data(), static_cast<int64_t>(pairs.rows.size())};
    expert_sum(compute, form, work, pairs.pair_of.data(), rule.chosen, residual, out);
}

}  // namespace thermocline
