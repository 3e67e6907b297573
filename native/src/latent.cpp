// Latent attention of a whole layer, made of products, the norm, the cache's rows and attention over them.
#include <cstring>
#include <vector>

#include "scratch.h"
#include "thermocline/layer.h"

namespace thermocline {
namespace {

// Numbers [from, from + width) of each row: to rows `to_stride` apart from rows `stride` apart.
void copy_columns(const float* from, int64_t rows, int64_t stride, int64_t width, float* to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(to + r * to_stride, from + r * stride, static_cast<size_t>(width) * sizeof(float));
}

// q [tokens, heads * q_width] and kv [tokens, latent + rotary_dims] of the normed input.
void project(const Compute& compute, const Dense& dense, Form form, const LatentPart& part, int64_t count,
             const float* normed, float* low, float* q, float* kv) {
    const Product down{part.kv, kv, part.kv.rows};
    const int64_t rank = part.low.rows;
    const Product first = part.has_low ? Product{part.low, low, rank} : Product{part.q, q, part.q.rows};
    const Product products[] = {first, down};
    multiply_all(compute, form, normed, count, products, 2);
    if (!part.has_low) return;
    rms_norm(dense, low, part.low_gain, part.epsilon, count, rank, low);
    const Product up{part.q, q, part.q.rows};
    multiply_all(compute, form, low, count, &up, 1);
}

// Rows [first, last) of one sequence.
struct Rows {
    int64_t sequence, first, last;
};

// All rows that take one form, and where runs of them begin that follow each other without a gap.
struct FormRows {
    std::vector<Rows> pieces;
    int64_t count = 0;

    void add(int64_t sequence, int64_t first, int64_t last) {
        if (first == last) return;
        pieces.push_back({sequence, first, last});
        count += last - first;
    }
};

struct Given {
    const float* q;  // [tokens, heads, q_width], turned
    const LayerTokens& tokens;
    const LayerCacheView& cache;
};

AttentionJob job_of(const LatentPart& part, const Given& given, const Rows& rows, const float* q, float* out) {
    return {q, given.tokens.positions + rows.first, rows.last - rows.first, part.heads, given.cache.shape,
            given.cache.keys, given.cache.keys, given.tokens.block_tables + given.tokens.table_starts[rows.sequence],
            part.scale, 0.0f, 0, out, nullptr, false, part.temperature};
}

void attend_absorbed(const Compute& compute, Form form, const LatentPart& part, const Given& given,
                     const FormRows& of, float* values) {
    const int64_t heads = part.heads, width = part.q_width(), plain = part.plain(), latent = part.latent();
    const int64_t dim = given.cache.shape.head_dim, value_dim = part.v_up.first.rows, rows = of.count * heads;
    if (rows == 0) return;
    thread_local Scratch memory;
    float* plain_q = memory.get<float>(rows * (plain + dim + latent));
    float* queries = plain_q + rows * plain;
    float* read = queries + rows * dim;
    std::vector<AttentionJob> jobs;
    int64_t at = 0;
    for (const Rows& piece : of.pieces) {
        const int64_t n = (piece.last - piece.first) * heads;
        const float* const q = given.q + piece.first * heads * width;
        copy_columns(q, n, width, plain, plain_q + at * plain, plain);
        copy_columns(q + plain, n, width, width - plain, queries + at * dim + latent, dim);
        jobs.push_back(job_of(part, given, piece, queries + at * dim, read + at * latent));
        at += n;
    }
    multiply_heads(compute, part.k_up, heads, plain_q, of.count, queries, dim);
    attention(compute, form, jobs.data(), static_cast<int64_t>(jobs.size()));
    // Rows of one form follow each other in memory, but may not in the chunk.
    at = 0;
    for (size_t i = 0; i < of.pieces.size();) {
        const int64_t first = of.pieces[i].first;
        int64_t last = first;
        for (; i < of.pieces.size() && of.pieces[i].first == last; ++i) last = of.pieces[i].last;
        multiply_heads(compute, part.v_up, heads, read + at * latent, last - first, values + first * heads * value_dim,
                       value_dim);
        at += (last - first) * heads;
    }
}

void attend_expanded(const Compute& compute, Form form, const LatentPart& part, const Given& given,
                     const FormRows& of, float* values) {
    if (of.count == 0) return;
    const Expansion expansion{part.k_up, part.v_up, compute.set.gemm->decode_row};
    const int64_t heads = part.heads;
    std::vector<AttentionJob> jobs;
    for (const Rows& piece : of.pieces) {
        jobs.push_back(job_of(part, given, piece, given.q + piece.first * heads * part.q_width(),
                              values + piece.first * heads * expansion.value_dim()));
        jobs.back().expansion = &expansion;
    }
    attention(compute, form, jobs.data(), static_cast<int64_t>(jobs.size()));
}

}  // namespace

void attend(const Compute& compute, const Dense& dense, Form form, const LatentPart& part, const LayerTokens& tokens,
            const LayerCacheView& cache, const float* x, float* out) {
    const int64_t count = tokens.count, hidden = part.output.rows, heads = part.heads;
    const int64_t rank = part.has_low ? part.low.rows : 0;
    thread_local Scratch memory;
    const int64_t value_dim = part.v_up.first.rows;
    float* normed =
        memory.get<float>(count * (hidden + rank + part.kv.rows + heads * (part.q_width() + value_dim + 1)));
    float* low = normed + count * hidden;
    float* kv = low + count * rank;
    float* q = kv + count * part.kv.rows;
    float* values = q + count * heads * part.q_width();
    float* gates = values + count * heads * value_dim;

    rms_norm(dense, x, part.norm, part.epsilon, count, hidden, normed);
    project(compute, dense, form, part, count, normed, low, q, kv);
    const bool is_gated = part.gate.data != nullptr;
    if (is_gated) {
        const Product gate{part.gate, gates, heads};
        multiply_all(compute, form, normed, count, &gate, 1);
    }
    prepare_latent(dense, {q, kv, count, heads, part.q_width(), part.kv_gain, part.epsilon, tokens.cosines,
                           tokens.sines, tokens.rotary_dims, cache.shape, cache.keys, tokens.slots});
    FormRows absorbed, expanded;
    for (int64_t s = 0; s < tokens.sequences; ++s) {
        const int64_t first = tokens.starts[s], middle = first + (tokens.expanded ? tokens.expanded[s] : 0);
        expanded.add(s, first, middle);
        absorbed.add(s, middle, tokens.starts[s + 1]);
    }
    const Given given{q, tokens, cache};
    attend_expanded(compute, form, part, given, expanded, values);
    attend_absorbed(compute, form, part, given, absorbed, values);
    if (is_gated) gate(dense, {values, gates, count * heads, value_dim, 1, 1, Activation::Sigmoid, values});
    const Product output{part.output, out, hidden, x};
    multiply_all(compute, form, values, count, &output, 1);
}

}  // namespace thermocline
