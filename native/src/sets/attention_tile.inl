// The inner loops of attention: tiles of R rows (a token and one of its heads each) against one block
// of kKeyBlock positions. Rows of a tile share every load of a key or value.
//
// One element's arithmetic is the same for every R: a score is added over the dimensions in order, a
// row's output over the positions in order, and its sum in sixteen lanes (position mod 16).
#pragma once

#include "attention_state.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

constexpr int64_t kKeyBlock = 64;
constexpr int kGroups = kKeyBlock / kWidth;

// Vectors of sums that a tile keeps in registers, and the most rows of a tile.
#if defined(THERMOCLINE_SIMD_AVX512)
constexpr int kAccumulators = 16, kMaxRows = 8;
#elif defined(THERMOCLINE_SIMD_AVX2) || defined(THERMOCLINE_SIMD_NEON)
constexpr int kAccumulators = 4, kMaxRows = 4;
#else
constexpr int kAccumulators = 2, kMaxRows = 2;
#endif

constexpr int vectors_for(int rows) {
    return kAccumulators / rows < 1 ? 1 : kAccumulators / rows > kGroups ? kGroups : kAccumulators / rows;
}

// Where one block's keys and values lie: sixteen positions at a time.
struct KeyBlock {
    int64_t base;  // its first position
    int first_group, last_group;  // groups that an item's rows see; what they do not read of them has no place
    const uint8_t* keys[kGroups];
    const uint8_t* values[kGroups];
    const uint8_t* next_keys[kGroups];  // of as many groups further on, to be fetched ahead
    int64_t value_bytes;                // from one position's values to the next
};

// What is known of R rows. `q` is [head_dim][R], scaled; the state is that of the current span.
struct RowTile {
    const float* q;
    const int64_t* begin;  // [R] first position that the row sees
    const int64_t* end;    // [R] one behind the last
    int64_t first, last;   // smallest begin, largest end
    int64_t common_first, common_last;  // positions that all rows see
    const uint16_t* const* chosen;      // [R] what the rows' tokens read, see AttentionJob; or null
    uint32_t groups;                    // the span's groups that any row reads, see Reach
    float* max;     // [R]
    float* sums;    // [R][16]
    float* acc;     // [R][acc_stride]
    float* scores;  // [R][kKeyBlock]
    float* decay;   // [R]
};

// Places of a block that a tile sees, the groups that hold them, and which of these any row reads.
struct Places {
    int64_t first, last;
    int first_group, last_group;
    uint32_t groups;

    bool reads(int64_t group) const { return (groups >> group & 1u) != 0; }
    // Whether all of the groups [group, group + count) are read.
    bool reads_all(int group, int count) const { return (~(groups >> group) & ((1u << count) - 1)) == 0; }
};

inline Places places_of(const RowTile& t, const KeyBlock& b) {
    const int64_t first = max_of(0, t.first - b.base), last = min_of(kKeyBlock, t.last - b.base);
    if (first >= last) return {0, 0, 0, 0, 0};
    const int first_group = static_cast<int>(first / kWidth), last_group = static_cast<int>((last + kWidth - 1) / kWidth);
    const uint32_t groups = t.groups >> span_group(b.base) & ((1u << last_group) - (1u << first_group));
    if (groups == 0) return {0, 0, 0, 0, 0};
    return {first, last, first_group, last_group, groups};
}

// Asks for `bytes` from `p` on. A tile computes for so long on each line that the processor, left to
// itself, asks for the next one too late.
template <int64_t Bytes>
inline __attribute__((always_inline)) void fetch_ahead(const uint8_t* p) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < Bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Keys and values as they lie in a cache whose blocks are made of whole groups.
template <CacheType Type>
struct InCache : Packed<Type> {
    static constexpr bool kFetchAhead = true;
    static const uint8_t* values(const KeyBlock& b, int64_t place, int64_t, int) {
        return b.values[place / kWidth] + place % kWidth * b.value_bytes;
    }
    static int64_t value_bytes(const KeyBlock& b, int) { return b.value_bytes; }
    static int64_t run_end(int64_t place) { return (place / kWidth + 1) * kWidth; }
    static Vec value(const uint8_t* row, int64_t vec, int n) { return Packed<Type>::row(row, vec + n); }
};

// As floats in scratch, cut so that the inner loops read them in the order of memory: keys in groups,
// values in panels [positions][vectors that a tile adds at once].
struct InScratch : Packed<CacheType::F32> {
    static constexpr bool kFetchAhead = false;
    static const uint8_t* values(const KeyBlock& b, int64_t place, int64_t vec, int vectors) {
        return b.values[place / kWidth] + (vec * kKeyBlock + place * vectors) * kWidth * 4;
    }
    static int64_t value_bytes(const KeyBlock&, int vectors) { return vectors * kWidth * 4; }
    static int64_t run_end(int64_t) { return kKeyBlock; }
    static Vec value(const uint8_t* row, int64_t, int n) {
        return load(reinterpret_cast<const float*>(row) + n * kWidth);
    }
};

template <class Source, int R, int N>
inline __attribute__((always_inline)) void add_dimension(const float* q, const uint8_t* const (&groups)[N],
                                                         int64_t d, const Vec (&units)[N],
                                                         Vec (&acc)[R][N]) {
    Vec key[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) key[n] = Source::numbers(groups[n], d, units[n]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const Vec left = broadcast(q[d * R + r]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[r][n] = fma(left, key[n], acc[r][n]);
    }
}

// scores[r][position] for N groups of the block; the same groups' values are fetched meanwhile.
template <class Source, int R, int N>
inline __attribute__((always_inline)) void score_groups(const RowTile& t, const KeyBlock& b, int group,
                                                        int64_t head_dim) {
    constexpr int64_t kUnroll = 4;
    const uint8_t* const* values = b.values + group;
    Vec acc[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[r][n] = zero();
    for (int64_t start = 0; start < head_dim; start += Source::kStep) {
        const uint8_t* numbers[N];
        Vec units[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            numbers[n] = b.keys[group + n] + start * Source::kVectorBytes;
            units[n] = Source::units(numbers[n]);
        }
        const float* const q = t.q + start * R;
        const int64_t count = min_of(head_dim - start, Source::kStep);
        int64_t d = 0;
        for (; d + kUnroll <= count; d += kUnroll) {
            if constexpr (Source::kFetchAhead)
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n)
                    fetch_ahead<kUnroll * Source::kVectorBytes>(values[n] +
                                                                (start + d) * Source::kVectorBytes);
#pragma GCC unroll 4
            for (int64_t j = 0; j < kUnroll; ++j)
                add_dimension<Source, R, N>(q, numbers, d + j, units, acc);
        }
        for (; d < count; ++d) add_dimension<Source, R, N>(q, numbers, d, units, acc);
    }
    float* const scores = t.scores + group * kWidth;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) store(scores + r * kKeyBlock + n * kWidth, acc[r][n]);
}

// Scores become exp2(score - max), where positions that a row does not read get 0; max and sums move on.
// decay is what the row's earlier sums are worth now. Groups that no row reads are left out: they would add zeros.
template <int R, bool Chosen>
inline void soften_tile(const RowTile& t, int64_t base, const Places& seen, float cap) {
    const int first = seen.first_group, last = seen.last_group;
    const int64_t begin = base + first * kWidth, end = base + last * kWidth;
    const bool masked = begin < t.common_first || t.common_last < end || Chosen;
    float tops[kWidth] = {}, shifts[kWidth];
    for (int r = 0; r < R; ++r) {
        const uint16_t* const chosen = Chosen ? t.chosen[r] : nullptr;
        Vec top = broadcast(kMinusInfinity);
        for (int g = first; g < last; ++g) {
            if (Chosen && !seen.reads(g)) continue;
            float* at = t.scores + r * kKeyBlock + g * kWidth;
            Vec score = load(at);
            if (cap > 0.0f) score = mul(tanh(score), broadcast(cap));
            if (masked)
                score = keep_bits(score, read_bits(base + g * kWidth, t.begin[r], t.end[r], chosen), kMinusInfinity);
            if (masked || cap > 0.0f) store(at, score);
            top = max(top, score);
        }
        tops[r] = reduce_max(top);
    }
    const Vec before = load_part(t.max, R);
    const Vec now = max(before, load_part(tops, R));
    // A row that has seen nothing yet: any finite shift gives weights of 0.
    const Vec shift = where_less(now, broadcast(-3.0e38f), zero(), now);
    store_part(t.max, now, R);
    store_part(t.decay, exp2(sub(before, shift)), R);
    store(shifts, shift);
    for (int r = 0; r < R; ++r) {
        const Vec down = broadcast(shifts[r]);
        Vec sum = mul(load(t.sums + r * kWidth), broadcast(t.decay[r]));
        for (int g = first; g < last; ++g) {
            if (Chosen && !seen.reads(g)) continue;
            float* at = t.scores + r * kKeyBlock + g * kWidth;
            const Vec weight = exp2(sub(load(at), down));
            store(at, weight);
            sum = add(sum, weight);
        }
        store(t.sums + r * kWidth, sum);
    }
}

template <class Source, int R, int N>
inline __attribute__((always_inline)) void add_place(const float* weights, const uint8_t* row, int64_t vec,
                                                     Vec (&acc)[R][N]) {
    Vec value[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) value[n] = Source::value(row, vec, n);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const Vec weight = broadcast(weights[r * kKeyBlock]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[r][n] = fma(weight, value[n], acc[r][n]);
    }
}

// acc = acc * decay + sum over the seen places of weight * value, for vectors [vec, vec + N). Keys further
// on are fetched meanwhile.
template <class Source, int R, int N>
inline __attribute__((always_inline)) void add_values(const RowTile& t, const KeyBlock& b,
                                                      const Places& seen, int64_t vec, int64_t stride) {
    constexpr int64_t kUnroll = 4, kAhead = N * Source::kVectorBytes;
    float* const out = t.acc + vec * kWidth;
    const int64_t row_bytes = Source::value_bytes(b, N);
    Vec acc[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            acc[r][n] = mul(load(out + r * stride + n * kWidth), broadcast(t.decay[r]));
    for (uint32_t groups = seen.groups; groups != 0;) {
        // Groups that follow each other, and what is seen of them.
        const int64_t group = __builtin_ctz(groups), behind = group + __builtin_ctz(~(groups >> group));
        groups &= ~0u << behind;
        const int64_t end = min_of(seen.last, behind * kWidth);
        for (int64_t p = max_of(seen.first, group * kWidth); p < end;) {
            const int64_t count = min_of(end, Source::run_end(p)) - p;
            const uint8_t* row = Source::values(b, p, vec, N);
            const float* const weights = t.scores + p;
            // Of the next keys, the share of this group and these vectors: a block's runs ask for all.
            const uint8_t* const ahead = b.next_keys[p / kWidth] + vec * kWidth * Source::kVectorBytes;
            int64_t i = 0;
            for (; i + kUnroll <= count; i += kUnroll) {
                if constexpr (Source::kFetchAhead) fetch_ahead<kUnroll * kAhead>(ahead + i * kAhead);
#pragma GCC unroll 4
                for (int64_t j = 0; j < kUnroll; ++j, row += row_bytes)
                    add_place<Source, R, N>(weights + i + j, row, vec, acc);
            }
            for (; i < count; ++i, row += row_bytes) add_place<Source, R, N>(weights + i, row, vec, acc);
            p += count;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) store(out + r * stride + n * kWidth, acc[r][n]);
}

struct TileShape {
    int64_t head_dim, acc_stride;
    float cap;  // 0, or the largest score in units of exp2
};

// All tiles of an item against one block. A piece of keys, then of values, serves every tile while it
// is in the nearest cache.
template <class Source, int R>
void attend_block(const RowTile* tiles, int64_t num_tiles, const KeyBlock& b, const TileShape& shape) {
    constexpr int N = vectors_for(R);
    for (int g = b.first_group; g < b.last_group;) {
        const int step = g + N <= b.last_group ? N : 1;
        for (int64_t i = 0; i < num_tiles; ++i) {
            const RowTile& t = tiles[i];
            const Places seen = places_of(t, b);
            const int first = g < seen.first_group ? seen.first_group : g;
            const int last = g + step < seen.last_group ? g + step : seen.last_group;
            if (last - first == N && seen.reads_all(g, N)) score_groups<Source, R, N>(t, b, g, shape.head_dim);
            else
                for (int one = first; one < last; ++one)
                    if (seen.reads(one)) score_groups<Source, R, 1>(t, b, one, shape.head_dim);
        }
        g += step;
    }
    for (int64_t i = 0; i < num_tiles; ++i) {
        const Places seen = places_of(tiles[i], b);
        if (seen.first >= seen.last) continue;
        if (tiles[i].chosen == nullptr) soften_tile<R, false>(tiles[i], b.base, seen, shape.cap);
        else soften_tile<R, true>(tiles[i], b.base, seen, shape.cap);
    }
    const int64_t vectors = shape.acc_stride / kWidth;
    for (int64_t vec = 0; vec < vectors;) {
        const int step = vec + N <= vectors ? N : 1;
        for (int64_t i = 0; i < num_tiles; ++i) {
            const Places seen = places_of(tiles[i], b);
            if (seen.first >= seen.last) continue;
            if (step == N) add_values<Source, R, N>(tiles[i], b, seen, vec, shape.acc_stride);
            else add_values<Source, R, 1>(tiles[i], b, seen, vec, shape.acc_stride);
        }
        vec += step;
    }
}

using AttendBlock = void (*)(const RowTile*, int64_t, const KeyBlock&, const TileShape&);

template <class Source>
AttendBlock block_function(int rows) {
    switch (rows) {
        case 1: return attend_block<Source, 1>;
        case 2: return attend_block<Source, 2>;
        case 3: return attend_block<Source, kMaxRows < 3 ? 1 : 3>;
        case 4: return attend_block<Source, kMaxRows < 4 ? 1 : 4>;
        case 5: return attend_block<Source, kMaxRows < 5 ? 1 : 5>;
        case 6: return attend_block<Source, kMaxRows < 6 ? 1 : 6>;
        case 7: return attend_block<Source, kMaxRows < 7 ? 1 : 7>;
        default: return attend_block<Source, kMaxRows < 8 ? 1 : 8>;
    }
}

inline AttendBlock in_cache_function(CacheType type, int rows) {
    switch (type) {
        case CacheType::F32: return block_function<InCache<CacheType::F32>>(rows);
        case CacheType::F16: return block_function<InCache<CacheType::F16>>(rows);
        case CacheType::BF16: return block_function<InCache<CacheType::BF16>>(rows);
        case CacheType::Q8_0: break;
    }
    return block_function<InCache<CacheType::Q8_0>>(rows);
}

// Rows per tile for so many rows. For a few rows, the number that leaves the fewest places empty.
inline int tile_rows(int64_t rows) {
    int best = kMaxRows;
    if (rows >= 2 * kMaxRows) return best;
    for (int r = kMaxRows - 1; 2 * r >= kMaxRows || rows <= r; --r)
        if (round_up(rows, r) < round_up(rows, best)) best = r;
    return best;
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
