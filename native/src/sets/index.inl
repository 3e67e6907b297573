// Scores of an indexer, by which a token's sparse attention chooses the positions that it reads.
//
// A product is added over a row's numbers in order, and a score over the heads in order, so that it depends on its token and
// its position alone.
#pragma once

#include "attention_source.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

// The rows of entries [first, first + count) as floats, [groups][dim][kWidth].
inline void load_index_rows(const IndexJob& job, int64_t first, int64_t count, float* groups) {
    const int64_t row_bytes = cache_row_bytes(job.type, job.dim);
    const auto convert = converters_of(job.type).latent;
    __builtin_memset(groups, 0, static_cast<size_t>(round_up(count, kWidth) * job.dim) * 4);
    LatentRows from{{}, row_bytes, 0, job.dim, 0, 1, 0, nullptr, nullptr};
    for (int64_t place = 0; place < count; place += from.count) {
        from.count = min_of(4, count - place);
        for (int64_t i = 0; i < from.count; ++i) {
            const int64_t position = (first + place + i + 1) * job.step - 1, block = job.block_table[position / job.block_tokens];
            from.rows[i] = job.rows + (block * job.block_tokens + position % job.block_tokens) * row_bytes;
        }
        from.keys = groups + place / kWidth * job.dim * kWidth + place % kWidth;
        convert(from);
    }
}

// Adds what R heads say of N groups, `least` at least.
template <int R, int N>
inline __attribute__((always_inline)) void add_heads(const float* q, const float* weights, int64_t dim, Vec least,
                                                     const float* groups, Vec (&sums)[N]) {
    Vec acc[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[r][n] = zero();
    for (int64_t d = 0; d < dim; ++d) {
        Vec key[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) key[n] = load(groups + (n * dim + d) * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec left = broadcast(q[r * dim + d]);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) acc[r][n] = fma(left, key[n], acc[r][n]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const Vec weight = broadcast(weights[r]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[n] = fma(weight, max(acc[r][n], least), sums[n]);
    }
}

template <int N>
inline void score_token(const IndexJob& job, int64_t token, const float* groups, int64_t count, float* out) {
    const float* q = job.q + token * job.heads * job.dim;
    const float* weights = job.weights + token * job.heads;
    const Vec least = broadcast(job.least);
    Vec sums[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sums[n] = zero();
    int64_t h = 0;
    for (; h + kMaxRows <= job.heads; h += kMaxRows)
        add_heads<kMaxRows, N>(q + h * job.dim, weights + h, job.dim, least, groups, sums);
    for (; h < job.heads; ++h) add_heads<1, N>(q + h * job.dim, weights + h, job.dim, least, groups, sums);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
        store_lanes(out + n * kWidth, sums[n], min_of(kWidth, count - n * kWidth));
}

void index_scores(const IndexJob& job, int64_t first, int64_t count, float* scratch) {
    constexpr int N = vectors_for(kMaxRows);
    load_index_rows(job, first, count, scratch);
    for (int64_t t = 0; t < job.tokens; ++t)
        for (int64_t place = 0; place < count;) {
            const float* const groups = scratch + place * job.dim;
            float* const out = job.out + t * job.count + first + place;
            const bool is_wide = count - place > (N - 1) * kWidth;
            if (is_wide) score_token<N>(job, t, groups, count - place, out);
            else score_token<1>(job, t, groups, count - place, out);
            place += is_wide ? N * kWidth : kWidth;
        }
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
