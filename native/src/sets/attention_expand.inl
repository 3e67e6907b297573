// Keys and values of one head of latent attention, made of the cache's rows for a block of positions: the expanded form.
//
// Each number is added over the latent numbers in order, so that it depends on its row and the head's matrices alone.
#pragma once

#include "attention_tile.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

// Latent numbers that are added at once: what they meet stays in the nearest cache.
constexpr int64_t kLatentPiece = 128;

// One head's matrices as floats, in the order in which they are read, and room for a block's rows.
struct ExpandedHead {
    int64_t latent, plain, rest;  // `rest`: numbers of a row behind the latent ones
    int64_t value_vectors;
    int64_t key_stride;  // numbers from one group's keys to the next's
    float key_scale, value_scale;
    float* k;     // [plain / kMaxRows][latent][kMaxRows]
    float* v;     // [value_vectors][latent][kWidth]
    float* rows;  // [kGroups][latent + rest][kWidth]

    float* group(int64_t g) const { return rows + g * (latent + rest) * kWidth; }
};

inline int64_t expanded_floats(const AttentionJob& job) {
    const int64_t latent = job.cache.latent, dim = job.cache.head_dim;
    return latent * (round_up(job.expansion->plain(), kMaxRows) + round_up(job.value_dim(), kWidth)) + kKeyBlock * dim +
           max_of(latent, job.expansion->plain());
}

// Decodes a head's matrices.
inline ExpandedHead load_head(const AttentionJob& job, int64_t head, float* scratch) {
    const Weight keys = job.expansion->k_up[head], values = job.expansion->v_up[head];
    ExpandedHead out;
    out.latent = job.cache.latent;
    out.plain = job.expansion->plain();
    out.rest = job.cache.head_dim - out.latent;
    out.value_vectors = round_up(job.value_dim(), kWidth) / kWidth;
    out.key_stride = kWidth * (round_up(out.plain, kMaxRows) + out.rest);
    out.key_scale = keys.scale;
    out.value_scale = values.scale;
    const int64_t padded = round_up(out.plain, kMaxRows);
    out.rows = scratch;
    out.k = out.rows + kKeyBlock * (out.latent + out.rest);
    out.v = out.k + padded * out.latent;
    float* const row = out.v + out.value_vectors * kWidth * out.latent;
    for (int64_t n = 0; n < out.latent; ++n) {
        job.expansion->decode_row(keys.type_id, keys.row(n), out.plain, row);
        for (int64_t d = 0; d < padded; ++d)
            out.k[(d / kMaxRows * out.latent + n) * kMaxRows + d % kMaxRows] = d < out.plain ? row[d] : 0.0f;
    }
    for (int64_t d = 0; d < out.value_vectors * kWidth; ++d) {
        float* const to = out.v + d / kWidth * out.latent * kWidth + d % kWidth;
        if (d < values.rows) job.expansion->decode_row(values.type_id, values.row(d), out.latent, row);
        for (int64_t n = 0; n < out.latent; ++n) to[n * kWidth] = d < values.rows ? row[n] : 0.0f;
    }
    return out;
}

// out[n][r * stride ..] (+)= sum over i < count of left[i * step + r] * right[n][i * kWidth ..].
template <int R, int N>
inline __attribute__((always_inline)) void add_outer(const float* left, int64_t step, const float* const (&right)[N],
                                                     int64_t count, bool first, float* const (&out)[N],
                                                     int64_t stride) {
    Vec acc[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[r][n] = first ? zero() : load(out[n] + r * stride);
#pragma GCC unroll 2
    for (int64_t i = 0; i < count; ++i) {
        Vec numbers[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) numbers[n] = load(right[n] + i * kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec one = broadcast(left[i * step + r]);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) acc[r][n] = fma(one, numbers[n], acc[r][n]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) store(out[n] + r * stride, acc[r][n]);
}

inline void scale_vectors(float factor, int64_t count, float* x) {
    if (factor == 1.0f) return;
    for (int64_t i = 0; i < count; ++i) store(x + i * kWidth, mul(load(x + i * kWidth), broadcast(factor)));
}

// Keys of groups [first, last): to[group][key_dim][kWidth], groups key_stride apart.
inline void expand_keys(const ExpandedHead& head, int first, int last, float* to) {
    constexpr int R = kMaxRows, N = vectors_for(kMaxRows);
    for (int64_t n = 0; n < head.latent; n += kLatentPiece) {
        const int64_t count = min_of(kLatentPiece, head.latent - n);
        for (int64_t d = 0; d < head.plain; d += R) {
            const float* const left = head.k + (d / R * head.latent + n) * R;
            int g = first;
            for (; g + N <= last; g += N) {
                const float* right[N];
                float* out[N];
                for (int i = 0; i < N; ++i) {
                    right[i] = head.group(g + i) + n * kWidth;
                    out[i] = to + (g + i) * head.key_stride + d * kWidth;
                }
                add_outer<R, N>(left, R, right, count, n == 0, out, kWidth);
            }
            for (; g < last; ++g)
                add_outer<R, 1>(left, R, {head.group(g) + n * kWidth}, count, n == 0,
                                {to + g * head.key_stride + d * kWidth}, kWidth);
        }
    }
    for (int g = first; g < last; ++g) {
        float* const keys = to + g * head.key_stride;
        scale_vectors(head.key_scale, head.plain, keys);
        __builtin_memcpy(keys + head.plain * kWidth, head.group(g) + head.latent * kWidth,
                         static_cast<size_t>(head.rest * kWidth) * 4);
    }
}

// Values of groups [first, last), into the panels of InScratch, `panel` vectors wide.
inline void expand_values(const ExpandedHead& head, int first, int last, int panel, float* to) {
    constexpr int R = kMaxRows;
    const int64_t in_panels = head.value_vectors / panel * panel;
    for (int64_t n = 0; n < head.latent; n += kLatentPiece) {
        const int64_t count = min_of(kLatentPiece, head.latent - n);
        for (int64_t vec = 0; vec < head.value_vectors; ++vec) {
            const int64_t width = vec < in_panels ? panel : 1, start = vec / width * width;
            const float* const right = head.v + (vec * head.latent + n) * kWidth;
            for (int64_t place = first * kWidth; place < last * kWidth; place += R)
                add_outer<R, 1>(head.group(place / kWidth) + n * kWidth + place % kWidth, kWidth, {right}, count, n == 0,
                                {to + (start * kKeyBlock + place * width + vec - start) * kWidth}, width * kWidth);
        }
    }
    scale_vectors(head.value_scale, head.value_scale == 1.0f ? 0 : head.value_vectors * kKeyBlock, to);
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
