// Running softmax of attention: what is known of some rows after some positions, and how such states are merged and
// written out. Shared by the kernels that add in float32 and those on tiles.
#pragma once

#include "cache.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kMinusInfinity = -__builtin_inff();

// State of some rows: max [rows], sum [rows], values [rows][stride]; rows is a multiple of sixteen.
struct State {
    float* max;
    float* sum;
    float* acc;
};

inline int64_t rows_of(const AttentionJob& job, int64_t num_tokens) {
    return num_tokens * job.group();
}

// Floats of the state of `rows` rows, a multiple of sixteen, and where they lie.
inline int64_t state_size(int64_t rows, int64_t stride) { return rows * (stride + 2); }
inline State state_at(int64_t rows, float* memory) { return {memory, memory + rows, memory + 2 * rows}; }

// Empties the state of `rows` rows; max and sum of all `padded` are read when states are merged.
inline void clear(const State& s, int64_t rows, int64_t padded, int64_t stride) {
    for (int64_t r = 0; r < padded; ++r) s.max[r] = kMinusInfinity;
    __builtin_memset(s.sum, 0, static_cast<size_t>(padded) * 4);
    __builtin_memset(s.acc, 0, static_cast<size_t>(rows * stride) * 4);
}

// In double, rounded once: every set gives the same factor.
inline float temperature_at(const Temperature& t, int64_t position) {
    if (t.scale == 0.0f) return 1.0f;
    const double steps = static_cast<double>((position + t.offset) / t.length);
    return static_cast<float>(1.0 + static_cast<double>(t.scale) * __builtin_log(1.0 + steps));
}

// What scores are multiplied by, so that a power of two of them is taken, or a hyperbolic tangent first.
inline float score_factor(const AttentionJob& job) {
    return job.softcap > 0.0f ? job.scale / job.softcap : job.scale * kLog2E;
}

static_assert(kWordPositions == kWidth);
constexpr int kSpanWords = kSpanTokens / kWidth;
static_assert(kSpanWords == 32, "a span's groups have a bit each of a word");

// Positions of a span that are seen, and the groups of sixteen with one that is read.
struct Reach {
    int64_t first, last;
    uint32_t groups = ~0u;  // bit g: of the span's positions from 16 * g on
};

// The bit of a position's group in its span.
inline int span_group(int64_t position) { return static_cast<int>(position % kSpanTokens / kWidth); }

// Which of the sixteen positions from `place` on are in [begin, end), and chosen where there is a choice. Words of positions
// from `end` on may be missing.
inline uint32_t read_bits(int64_t place, int64_t begin, int64_t end, const uint16_t* chosen) {
    const int64_t low = min_of(kWidth, max_of(0, begin - place)), high = min_of(kWidth, max_of(0, end - place));
    if (low >= high) return 0;
    const uint32_t bits = (1u << high) - (1u << low);
    return chosen == nullptr ? bits : bits & chosen[place / kWidth];
}

// total = total merged with `next`, the span behind it.
inline void merge(const State& total, const State& next, int64_t rows, int64_t stride) {
    for (int64_t first = 0; first < rows; first += kWidth) {
        const Vec a = load(total.max + first), b = load(next.max + first);
        const Vec top = max(a, b);
        const Vec shift = where_less(top, broadcast(-3.0e38f), zero(), top);
        const Vec keep = exp2(sub(a, shift)), gain = exp2(sub(b, shift));
        float keeps[kWidth], gains[kWidth];
        store(keeps, keep);
        store(gains, gain);
        store(total.max + first, top);
        store(total.sum + first, fma(load(total.sum + first), keep, mul(load(next.sum + first), gain)));
        for (int64_t r = first; r < min_of(rows, first + kWidth); ++r) {
            const Vec keep_row = broadcast(keeps[r - first]), gain_row = broadcast(gains[r - first]);
            for (int64_t d = 0; d < stride; d += kWidth) {
                float* const at = total.acc + r * stride + d;
                store(at, fma(load(at), keep_row, mul(load(next.acc + r * stride + d), gain_row)));
            }
        }
    }
}

// What the values' sum is multiplied by where a sink takes part: once for a row, when all spans are merged.
inline float share_beside_sink(const State& total, int64_t row, float sink) {
    const Vec score = broadcast(sink * kLog2E), own = broadcast(total.max[row]);
    const Vec top = max(own, score), keep = exp2(sub(own, top));
    float lanes[kWidth];
    store(lanes, div(keep, fma(broadcast(total.sum[row]), keep, exp2(sub(score, top)))));
    return lanes[0];
}

inline void write_output(const AttentionJob& job, const AttentionItem& work, const State& total,
                         int64_t rows, int64_t stride) {
    const int64_t dim = job.value_dim(), group = job.group();
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = work.first_token + r / group;
        float* out = job.out + (token * job.heads + work.slice * group + r % group) * dim;
        const int64_t head = work.slice * group + r % group;
        const Vec inverse = broadcast(job.sinks == nullptr ? 1.0f / total.sum[r]
                                                           : share_beside_sink(total, r, job.sinks[head]));
        for (int64_t d = 0; d < dim; d += kWidth)
            store_part(out + d, mul(load(total.acc + r * stride + d), inverse), min_of(kWidth, dim - d));
    }
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
