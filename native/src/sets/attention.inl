// Attention over a paged cache: one item is some tokens, with all query heads of one key head.
//
// Positions are cut at absolute places: the softmax runs in blocks of kKeyBlock positions, and starts
// anew with every span of kSpanTokens; the states of spans (max, sum, weighted values) are merged in
// order. An item that computes all spans itself merges as it goes, so both ways give the same bits.
#pragma once

#include "attention_expand.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

constexpr float kLog2E = 1.44269504f;

// State of some rows: max [rows], sum [rows], values [rows][stride]; rows is a multiple of sixteen.
struct State {
    float* max;
    float* sum;
    float* acc;
};

inline int64_t acc_stride(const AttentionJob& job) { return round_up(job.value_dim(), kWidth); }

inline int64_t rows_of(const AttentionJob& job, int64_t num_tokens) {
    return num_tokens * job.group();
}

// A tile's last rows may be empty, and rows are treated by sixteen when states are merged.
inline int64_t padded_rows(int64_t rows) { return round_up(rows, kWidth) + kWidth; }

int64_t state_floats(const AttentionJob& job, int64_t num_tokens) {
    return padded_rows(rows_of(job, num_tokens)) * (acc_stride(job) + 2);
}

inline State state_at(const AttentionJob& job, int64_t num_tokens, float* memory) {
    const int64_t rows = padded_rows(rows_of(job, num_tokens));
    return {memory, memory + rows, memory + 2 * rows};
}

// Everything that an item keeps between blocks, carved from the caller's scratch.
struct Item {
    int64_t rows, padded, stride;
    int tile;  // rows per tile
    int64_t num_tiles;
    RowTile* tiles;
    float* q;  // [tiles][head_dim][rows per tile]
    int64_t* begin;
    int64_t* end;
    float* sums;    // [rows][16]
    float* scores;  // [rows][kKeyBlock]
    float* decay;   // [rows]
    State first, next;  // of the spans so far, and of the span behind them
    float* keys;        // a block's keys and values as floats, see InScratch
    float* values;
    ExpandedHead head;  // where keys and values are made of a latent cache
};

// Numbers of a group's keys in scratch: some beyond the last may be written when they are made.
inline int64_t scratch_key_dim(const AttentionJob& job) { return job.key_dim() + (job.expansion ? kMaxRows : 0); }

int64_t scratch_floats(const AttentionJob& job, int64_t num_tokens) {
    const int64_t rows = padded_rows(rows_of(job, num_tokens)), dim = job.key_dim();
    const int64_t tile_floats = static_cast<int64_t>(sizeof(RowTile) / sizeof(float));
    return rows * (dim + 5 + kWidth + kKeyBlock + tile_floats) + 2 * state_floats(job, num_tokens) +
           kKeyBlock * (scratch_key_dim(job) + acc_stride(job)) + 16 * kWidth +
           (job.expansion ? expanded_floats(job) : 0);
}

inline Item carve(const AttentionJob& job, const AttentionItem& work, float* scratch) {
    Item item;
    item.rows = rows_of(job, work.num_tokens);
    item.padded = padded_rows(item.rows);
    item.stride = acc_stride(job);
    item.tile = tile_rows(item.rows);
    item.num_tiles = (item.rows + item.tile - 1) / item.tile;
    const auto take = [&scratch](int64_t floats) {
        float* const at = scratch;
        scratch += round_up(floats, kWidth);
        return at;
    };
    item.keys = take(kKeyBlock * scratch_key_dim(job));
    item.values = take(kKeyBlock * item.stride);
    item.q = take(item.padded * job.key_dim());
    item.begin = reinterpret_cast<int64_t*>(take(2 * item.padded));
    item.end = reinterpret_cast<int64_t*>(take(2 * item.padded));
    item.sums = take(item.padded * kWidth);
    item.scores = take(item.padded * kKeyBlock);
    item.decay = take(item.padded);
    item.tiles = reinterpret_cast<RowTile*>(
        take(item.padded * static_cast<int64_t>(sizeof(RowTile) / sizeof(float))));
    item.first = state_at(job, work.num_tokens, take(state_floats(job, work.num_tokens)));
    item.next = state_at(job, work.num_tokens, take(state_floats(job, work.num_tokens)));
    if (job.expansion) item.head = load_head(job, work.slice, take(expanded_floats(job)));
    return item;
}

// Empties the state of `rows` rows; max and sum of all `padded` are read when states are merged.
inline void clear(const State& s, int64_t rows, int64_t padded, int64_t stride) {
    for (int64_t r = 0; r < padded; ++r) s.max[r] = kMinusInfinity;
    __builtin_memset(s.sum, 0, static_cast<size_t>(padded) * 4);
    __builtin_memset(s.acc, 0, static_cast<size_t>(rows * stride) * 4);
}

typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));

// to[d * stride + r] = rows[r][d] * factors[r], for four rows and dimensions [0, count), four at a time.
inline void transpose_four(const float* const (&rows)[4], int64_t count, const float* factors, float* to,
                           int64_t stride) {
    typedef int32_t Lanes __attribute__((vector_size(16)));
    for (int64_t d = 0; d + 4 <= count; d += 4) {
        Four in[4];
        for (int r = 0; r < 4; ++r) in[r] = *reinterpret_cast<const UnalignedFour*>(rows[r] + d) * factors[r];
        const Four a = __builtin_shuffle(in[0], in[1], Lanes{0, 4, 1, 5});
        const Four b = __builtin_shuffle(in[2], in[3], Lanes{0, 4, 1, 5});
        const Four c = __builtin_shuffle(in[0], in[1], Lanes{2, 6, 3, 7});
        const Four e = __builtin_shuffle(in[2], in[3], Lanes{2, 6, 3, 7});
        const Four out[4] = {
            __builtin_shuffle(a, b, Lanes{0, 1, 4, 5}), __builtin_shuffle(a, b, Lanes{2, 3, 6, 7}),
            __builtin_shuffle(c, e, Lanes{0, 1, 4, 5}), __builtin_shuffle(c, e, Lanes{2, 3, 6, 7})};
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<UnalignedFour*>(to + (d + i) * stride) = out[i];
    }
    for (int64_t d = count / 4 * 4; d < count; ++d)
        for (int r = 0; r < 4; ++r) to[d * stride + r] = rows[r][d] * factors[r];
}

// The queries of one tile, [head_dim][rows]. Empty rows repeat the last row.
inline void load_queries(const float* const* rows, const float* factors, int tile, int64_t dim, float* to) {
    int r = 0;
    for (; r + 4 <= tile; r += 4)
        transpose_four({rows[r], rows[r + 1], rows[r + 2], rows[r + 3]}, dim, factors + r, to + r, tile);
    for (; r < tile; ++r)
        for (int64_t d = 0; d < dim; ++d) to[d * tile + r] = rows[r][d] * factors[r];
}

// In double, rounded once: every set gives the same factor.
inline float temperature_at(const Temperature& t, int64_t position) {
    if (t.scale == 0.0f) return 1.0f;
    const double steps = static_cast<double>((position + t.offset) / t.length);
    return static_cast<float>(1.0 + static_cast<double>(t.scale) * __builtin_log(1.0 + steps));
}

// Row r is query head r % group of token r / group.
inline void load_rows(const AttentionJob& job, const AttentionItem& work, const Item& item) {
    const int64_t dim = job.key_dim(), group = job.group();
    const float factor = job.softcap > 0.0f ? job.scale / job.softcap : job.scale * kLog2E;
    for (int64_t i = 0; i < item.num_tiles; ++i) {
        const int64_t start = i * item.tile;
        const float* rows[kMaxRows];
        float factors[kMaxRows];
        RowTile t{item.q + start * dim,
                  item.begin + start,
                  item.end + start,
                  INT64_MAX,
                  0,
                  0,
                  INT64_MAX,
                  nullptr,
                  item.sums + start * kWidth,
                  nullptr,
                  item.scores + start * kKeyBlock,
                  item.decay + start};
        for (int r = 0; r < item.tile; ++r) {
            const int64_t row = min_of(start + r, item.rows - 1), token = work.first_token + row / group;
            rows[r] = job.q + (token * job.heads + work.slice * group + row % group) * dim;
            const int64_t end = job.positions[token] + 1, begin = job.first_seen(end - 1);
            factors[r] = factor * temperature_at(job.temperature, end - 1);
            item.begin[start + r] = begin;
            item.end[start + r] = end;
            t.first = min_of(t.first, begin);
            t.last = max_of(t.last, end);
            t.common_first = max_of(t.common_first, begin);
            t.common_last = min_of(t.common_last, end);
        }
        load_queries(rows, factors, item.tile, dim, item.q + start * dim);
        item.tiles[i] = t;
    }
}

// Points the tiles at the state of a span, and empties it.
inline void begin_span(const Item& item, const State& state) {
    const int64_t rows = item.num_tiles * item.tile;
    clear(state, rows, item.padded, item.stride);
    __builtin_memset(item.sums, 0, static_cast<size_t>(rows * kWidth) * 4);
    for (int64_t i = 0; i < item.num_tiles; ++i) {
        item.tiles[i].max = state.max + i * item.tile;
        item.tiles[i].acc = state.acc + i * item.tile * item.stride;
    }
}

struct Reach {
    int64_t first, last;
};

// Positions that any row of the item sees.
inline Reach reach_of(const Item& item) {
    Reach reach{item.tiles[0].first, item.tiles[0].last};
    for (int64_t i = 1; i < item.num_tiles; ++i) {
        reach.first = min_of(reach.first, item.tiles[i].first);
        reach.last = max_of(reach.last, item.tiles[i].last);
    }
    return reach;
}

// Bytes from the cache's start to a position's head, when its block is made of whole groups.
inline int64_t row_offset(const AttentionJob& job, int64_t row_bytes, int64_t kv_head, int64_t position) {
    const int64_t block = job.block_table[position / job.cache.block_tokens];
    return head_offset(job.cache, row_bytes, block, kv_head) +
           position % job.cache.block_tokens * row_bytes;
}

// The block at `base`, without its places.
inline KeyBlock empty_block(int64_t base, const Reach& reach) {
    const int64_t first = max_of(0, reach.first - base), last = min_of(kKeyBlock, reach.last - base);
    KeyBlock b{};
    b.base = base;
    b.first_group = static_cast<int>(first / kWidth);
    b.last_group = static_cast<int>((last + kWidth - 1) / kWidth);
    return b;
}

// Groups that hold positions of `reach`, as they lie in the cache.
inline KeyBlock block_in_cache(const AttentionJob& job, int64_t row_bytes, int64_t kv_head, int64_t base,
                               const Reach& reach) {
    KeyBlock b = empty_block(base, reach);
    b.value_bytes = row_bytes;
    for (int g = b.first_group; g < b.last_group; ++g) {
        const int64_t offset = row_offset(job, row_bytes, kv_head, base + g * kWidth);
        b.keys[g] = job.keys + offset;
        b.values[g] = job.values + offset;
    }
    for (int g = 0; g < kGroups; ++g) {
        const int64_t next = min_of(base + kKeyBlock + g * kWidth, reach.last - 1) / kWidth * kWidth;
        b.next_keys[g] = job.keys + row_offset(job, row_bytes, kv_head, next);
    }
    return b;
}

template <CacheType Type>
void convert_group(const uint8_t* group, int64_t dim, float* out) {
    using Source = Packed<Type>;
    for (int64_t start = 0; start < dim; start += Source::kStep) {
        const uint8_t* const step = group + start * Source::kVectorBytes;
        const Vec units = Source::units(step);
        for (int64_t d = 0; d < min_of(dim - start, Source::kStep); ++d)
            store(out + (start + d) * kWidth, Source::numbers(step, d, units));
    }
}

// Vector `vec` of a row of `dim` numbers.
template <CacheType Type>
inline Vec row_vector(const uint8_t* row, int64_t row_bytes, int64_t dim, int64_t vec) {
    const int64_t left = dim - vec * kWidth;
    if (left >= kWidth) return Packed<Type>::row(row, vec);
    // A head narrower than its vectors; its type is one of single numbers.
    uint8_t bytes[4 * kWidth] = {};
    const int64_t number_bytes = row_bytes / dim;
    __builtin_memcpy(bytes, row + vec * kWidth * number_bytes, static_cast<size_t>(left * number_bytes));
    return Packed<Type>::row(bytes, 0);
}

// Values of `count` positions, row after row, into the panels of InScratch, `panel` vectors wide; `place`
// is the first one's place in the block.
template <CacheType Type>
void convert_rows(const uint8_t* rows, int64_t row_bytes, int64_t count, int64_t dim, int panel,
                  int64_t place, float* out) {
    const int64_t vectors = (dim + kWidth - 1) / kWidth;
    for (int64_t first = 0; first < vectors;) {
        const int64_t width = first + panel <= vectors ? panel : 1;
        for (int64_t vec = first; vec < first + width; ++vec) {
            float* to = out + (first * kKeyBlock + place * width + vec - first) * kWidth;
            for (int64_t p = 0; p < count; ++p, to += width * kWidth) {
                store(to, row_vector<Type>(rows + p * row_bytes, row_bytes, dim, vec));
            }
        }
        first += width;
    }
}

// Rows of a latent cache: up to four positions that follow each other, as keys and values of a block in scratch.
struct LatentRows {
    const uint8_t* rows;
    int64_t row_bytes, count;
    int64_t dim, value_dim;
    int panel;
    int64_t place;  // the first one's place in the block
    float* keys;    // of its group and lane
    float* values;  // or null
};

constexpr float kOnes[4] = {1.0f, 1.0f, 1.0f, 1.0f};

template <CacheType Type>
void convert_latent(const LatentRows& from) {
    const int64_t vectors = (from.dim + kWidth - 1) / kWidth, values = (from.value_dim + kWidth - 1) / kWidth;
    const int64_t in_panels = values / from.panel * from.panel;
    for (int64_t vec = 0; vec < vectors; ++vec) {
        float rows[4][kWidth];
        for (int64_t p = 0; p < from.count; ++p)
            store(rows[p], row_vector<Type>(from.rows + p * from.row_bytes, from.row_bytes, from.dim, vec));
        const int64_t dims = min_of(kWidth, from.dim - vec * kWidth);
        float* const keys = from.keys + vec * kWidth * kWidth;
        if (from.count == 4) {
            transpose_four({rows[0], rows[1], rows[2], rows[3]}, dims, kOnes, keys, kWidth);
        } else {
            for (int64_t p = 0; p < from.count; ++p)
                for (int64_t d = 0; d < dims; ++d) keys[d * kWidth + p] = rows[p][d];
        }
        if (vec >= values || from.values == nullptr) continue;
        const int64_t width = vec < in_panels ? from.panel : 1, first = vec / width * width;
        for (int64_t p = 0; p < from.count; ++p)
            store(from.values + (first * kKeyBlock + (from.place + p) * width + vec - first) * kWidth, load(rows[p]));
    }
}

struct Converters {
    void (*group)(const uint8_t*, int64_t, float*);
    void (*rows)(const uint8_t*, int64_t, int64_t, int64_t, int, int64_t, float*);
    void (*latent)(const LatentRows&);
};

inline Converters converters_of(CacheType type) {
    switch (type) {
        case CacheType::F32: return {convert_group<CacheType::F32>, convert_rows<CacheType::F32>, convert_latent<CacheType::F32>};
        case CacheType::F16: return {convert_group<CacheType::F16>, convert_rows<CacheType::F16>, convert_latent<CacheType::F16>};
        case CacheType::BF16: return {convert_group<CacheType::BF16>, convert_rows<CacheType::BF16>, convert_latent<CacheType::BF16>};
        case CacheType::Q8_0: break;
    }
    return {convert_group<CacheType::Q8_0>, convert_rows<CacheType::Q8_0>, convert_latent<CacheType::Q8_0>};
}

// A key that lies in a group of other than sixteen tokens, or across groups.
inline void convert_key(const AttentionJob& job, int64_t row_bytes, int64_t kv_head, int64_t position,
                        float* out) {
    const CacheShape& c = job.cache;
    const int64_t block = job.block_table[position / c.block_tokens];
    const KeyPlace at = key_place(c, row_bytes, position % c.block_tokens);
    const uint8_t* group = job.keys + head_offset(c, row_bytes, block, kv_head) + at.group_offset;
    for (int64_t d = 0; d < c.head_dim; ++d) out[d * kWidth] = read_key(c.type, group, at, d);
}

// Positions [first, last) of one group of a latent cache.
inline void latent_in_scratch(const AttentionJob& job, int64_t row_bytes, const Converters& convert, int panel,
                              int64_t base, int64_t first, int64_t last, float* keys, float* values) {
    const CacheShape& c = job.cache;
    for (int64_t p = first; p < last;) {
        const int64_t in_block = c.block_tokens - p % c.block_tokens;
        const int64_t count = min_of(min_of(4, last - p), in_block);
        convert.latent({job.keys + row_offset(job, row_bytes, 0, p), row_bytes, count, c.head_dim, c.latent, panel,
                        p - base, keys + p % kWidth, values});
        p += count;
    }
}

// The keys and values of one head for a block, made of a latent cache's rows.
inline KeyBlock block_expanded(const AttentionJob& job, int64_t row_bytes, int64_t base, const Reach& reach,
                               const Item& item) {
    const Converters convert = converters_of(job.cache.type);
    const int panel = vectors_for(item.tile);
    KeyBlock b = empty_block(base, reach);
    for (int g = b.first_group; g < b.last_group; ++g) {
        const int64_t place = base + g * kWidth;
        const int64_t first = max_of(reach.first, place), last = min_of(reach.last, place + kWidth);
        latent_in_scratch(job, row_bytes, convert, panel, base, first, last, item.head.group(g), nullptr);
        b.keys[g] = reinterpret_cast<const uint8_t*>(item.keys + g * item.head.key_stride);
        b.values[g] = reinterpret_cast<const uint8_t*>(item.values);
    }
    expand_keys(item.head, b.first_group, b.last_group, item.keys);
    expand_values(item.head, b.first_group, b.last_group, panel, item.values);
    return b;
}

// The block's keys and values as floats in the item's scratch, for all of its tiles.
inline KeyBlock block_in_scratch(const AttentionJob& job, int64_t row_bytes, int64_t kv_head, int64_t base,
                                 const Reach& reach, const Item& item) {
    if (job.expansion) return block_expanded(job, row_bytes, base, reach, item);
    const int64_t dim = job.cache.head_dim;
    const Converters convert = converters_of(job.cache.type);
    const int panel = vectors_for(item.tile);
    const bool whole_groups = job.cache.block_tokens % kWidth == 0;
    KeyBlock b = empty_block(base, reach);
    for (int g = b.first_group; g < b.last_group; ++g) {
        const int64_t place = base + g * kWidth;
        const int64_t first = max_of(reach.first, place), last = min_of(reach.last, place + kWidth);
        float* const keys = item.keys + g * kWidth * dim;
        b.keys[g] = reinterpret_cast<const uint8_t*>(keys);
        // A group's place depends on the panel's width, so positions count from the block's start.
        b.values[g] = reinterpret_cast<const uint8_t*>(item.values);
        if (job.cache.latent > 0) {
            latent_in_scratch(job, row_bytes, convert, panel, base, first, last, keys, item.values);
            continue;
        }
        if (whole_groups) {
            const int64_t offset = row_offset(job, row_bytes, kv_head, place);
            convert.group(job.keys + offset, dim, keys);
            convert.rows(job.values + offset + (first - place) * row_bytes, row_bytes, last - first, dim,
                         panel, first - base, item.values);
            continue;
        }
        for (int64_t p = first; p < last; ++p) {
            convert_key(job, row_bytes, kv_head, p, keys + p % kWidth);
            convert.rows(job.values + row_offset(job, row_bytes, kv_head, p), row_bytes, 1, dim, panel,
                         p - base, item.values);
        }
    }
    return b;
}

inline void attend_span(const AttentionJob& job, const AttentionItem& work, const Item& item,
                        const Reach& reach) {
    const CacheShape& c = job.cache;
    const int64_t kv_head = work.slice / job.slices();
    const int64_t row_bytes = cache_row_bytes(c.type, c.head_dim);
    // One tile reads each number once: converting it on the way is cheaper than by way of memory.
    const bool direct =
        c.latent == 0 && c.block_tokens % kWidth == 0 && c.head_dim % kWidth == 0 && item.num_tiles <= 2;
    const AttendBlock attend =
        direct ? in_cache_function(c.type, item.tile) : block_function<InScratch>(item.tile);
    const TileShape shape{job.key_dim(), item.stride, job.softcap > 0.0f ? job.softcap * kLog2E : 0.0f};
    for (int64_t base = reach.first / kKeyBlock * kKeyBlock; base < reach.last; base += kKeyBlock)
        attend(item.tiles, item.num_tiles,
               direct ? block_in_cache(job, row_bytes, kv_head, base, reach)
                      : block_in_scratch(job, row_bytes, kv_head, base, reach, item),
               shape);
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

void attention(const AttentionJob& job, const AttentionItem& work, float* scratch) {
    const Item item = carve(job, work, scratch);
    load_rows(job, work, item);
    const Reach reach = reach_of(item);
    for (int64_t s = 0; s < work.num_spans; ++s) {
        const int64_t start = (work.first_span + s) * kSpanTokens;
        const Reach part{max_of(reach.first, start), min_of(reach.last, start + kSpanTokens)};
        const State state = work.partial != nullptr
                                ? state_at(job, work.num_tokens,
                                           work.partial + s * state_floats(job, work.num_tokens))
                            : s == 0 ? item.first
                                     : item.next;
        begin_span(item, state);
        if (part.first < part.last) attend_span(job, work, item, part);
        for (int64_t r = 0; r < item.rows; ++r) state.sum[r] = reduce_add(load(item.sums + r * kWidth));
        if (work.partial == nullptr && s > 0) merge(item.first, state, item.rows, item.stride);
    }
    if (work.partial == nullptr) write_output(job, work, item.first, item.rows, item.stride);
}

void attention_merge(const AttentionJob& job, const AttentionItem& work) {
    const int64_t rows = rows_of(job, work.num_tokens), floats = state_floats(job, work.num_tokens);
    const State first = state_at(job, work.num_tokens, work.partial);
    for (int64_t s = 1; s < work.num_spans; ++s)
        merge(first, state_at(job, work.num_tokens, work.partial + s * floats), rows, acc_stride(job));
    write_output(job, work, first, rows, acc_stride(job));
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
