// Attention over a paged cache: one item is some tokens, with all query heads of one key head.
//
// Positions are cut at absolute places: the softmax runs in blocks of kKeyBlock positions, and starts
// anew with every span of kSpanTokens; the states of spans (max, sum, weighted values) are merged in
// order. An item that computes all spans itself merges as it goes, so both ways give the same bits.
#pragma once

#include "attention_source.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

inline int64_t acc_stride(const AttentionJob& job) { return round_up(job.value_dim(), kWidth); }

// A tile's last rows may be empty, and rows are treated by sixteen when states are merged.
inline int64_t padded_rows(int64_t rows) { return round_up(rows, kWidth) + kWidth; }

int64_t state_floats(const AttentionJob& job, int64_t num_tokens) {
    return state_size(padded_rows(rows_of(job, num_tokens)), acc_stride(job));
}

inline State state_at(const AttentionJob& job, int64_t num_tokens, float* memory) {
    return state_at(padded_rows(rows_of(job, num_tokens)), memory);
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
    const uint16_t** chosen;  // [rows], or null: all is read
    float* sums;    // [rows][16]
    float* scores;  // [rows][kKeyBlock]
    float* decay;   // [rows]
    State first, next;  // of the spans so far, and of the span behind them
    BlockMemory block;
    ExpandedHead head;  // where keys and values are made of a latent cache
};

int64_t scratch_floats(const AttentionJob& job, int64_t num_tokens) {
    const int64_t rows = padded_rows(rows_of(job, num_tokens)), dim = job.key_dim();
    const int64_t tile_floats = static_cast<int64_t>(sizeof(RowTile) / sizeof(float));
    return rows * (dim + 7 + kWidth + kKeyBlock + tile_floats) + 2 * state_floats(job, num_tokens) +
           block_floats(job) + 17 * kWidth + (job.expansion ? expanded_floats(job) : 0);
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
    item.block = block_memory(job, vectors_for(item.tile), take(block_floats(job)));
    item.q = take(item.padded * job.key_dim());
    item.begin = reinterpret_cast<int64_t*>(take(2 * item.padded));
    item.end = reinterpret_cast<int64_t*>(take(2 * item.padded));
    const uint16_t** const chosen = reinterpret_cast<const uint16_t**>(take(2 * item.padded));
    item.chosen = job.chosen == nullptr ? nullptr : chosen;
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

// The queries of one tile, [head_dim][rows]. Empty rows repeat the last row.
inline void load_queries(const float* const* rows, const float* factors, int tile, int64_t dim, float* to) {
    int r = 0;
    for (; r + 4 <= tile; r += 4)
        transpose_four({rows[r], rows[r + 1], rows[r + 2], rows[r + 3]}, dim, factors + r, to + r, tile);
    for (; r < tile; ++r)
        for (int64_t d = 0; d < dim; ++d) to[d * tile + r] = rows[r][d] * factors[r];
}

// Row r is query head r % group of token r / group.
inline void load_rows(const AttentionJob& job, const AttentionItem& work, const Item& item) {
    const int64_t dim = job.key_dim(), group = job.group();
    const float factor = score_factor(job);
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
                  item.chosen == nullptr ? nullptr : item.chosen + start,
                  0,
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
            if (item.chosen != nullptr) item.chosen[start + r] = job.chosen_of(token, work.slice);
            t.first = min_of(t.first, begin);
            t.last = max_of(t.last, end);
            t.common_first = max_of(t.common_first, begin);
            t.common_last = min_of(t.common_last, end);
        }
        load_queries(rows, factors, item.tile, dim, item.q + start * dim);
        item.tiles[i] = t;
    }
}

// Groups of the span at `start` that any of a tile's rows reads.
inline uint32_t groups_read(const RowTile& t, int rows, int64_t start) {
    if (t.chosen == nullptr) return ~0u;
    uint32_t groups = 0;
    for (int r = 0; r < rows; ++r) {
        if (r > 0 && t.chosen[r] == t.chosen[r - 1]) continue;  // another head of the token
        const int64_t last = min_of(t.end[r], start + kSpanTokens);
        for (int64_t p = max_of(t.begin[r] / kWidth * kWidth, start); p < last; p += kWidth)
            groups |= static_cast<uint32_t>(t.chosen[r][p / kWidth] != 0) << span_group(p);
    }
    return groups;
}

// The same of all tiles, which learn theirs.
inline uint32_t find_groups(const Item& item, int64_t start) {
    uint32_t groups = 0;
    for (int64_t i = 0; i < item.num_tiles; ++i)
        groups |= item.tiles[i].groups = groups_read(item.tiles[i], item.tile, start);
    return groups;
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

// Positions that any row of the item sees.
inline Reach reach_of(const Item& item) {
    Reach reach{item.tiles[0].first, item.tiles[0].last};
    for (int64_t i = 1; i < item.num_tiles; ++i) {
        reach.first = min_of(reach.first, item.tiles[i].first);
        reach.last = max_of(reach.last, item.tiles[i].last);
    }
    return reach;
}

inline void attend_span(const AttentionJob& job, const AttentionItem& work, const Item& item,
                        const Reach& reach) {
    const CacheShape& c = job.cache;
    const int64_t kv_head = work.slice / job.slices();
    const int64_t row_bytes = cache_row_bytes(c.type, c.head_dim);
    // One tile reads each number once: converting it on the way is cheaper than by way of memory.
    const bool direct = lies_in_vectors(c) && item.num_tiles <= 2;
    const AttendBlock attend =
        direct ? in_cache_function(c.type, item.tile) : block_function<InScratch>(item.tile);
    const TileShape shape{job.key_dim(), item.stride, job.softcap > 0.0f ? job.softcap * kLog2E : 0.0f};
    for (int64_t base = reach.first / kKeyBlock * kKeyBlock; base < reach.last; base += kKeyBlock) {
        if (!reads_block(reach, base)) continue;
        attend(item.tiles, item.num_tiles,
               job.expansion ? block_expanded(job, row_bytes, base, reach, item.head, item.block)
               : direct      ? block_in_cache(job, row_bytes, kv_head, base, reach)
                             : block_in_scratch(job, row_bytes, kv_head, base, reach, item.block),
               shape);
    }
}

void attention(const AttentionJob& job, const AttentionItem& work, float* scratch) {
    const Item item = carve(job, work, scratch);
    load_rows(job, work, item);
    const Reach reach = reach_of(item);
    for (int64_t s = 0; s < work.num_spans; ++s) {
        const int64_t start = (work.first_span + s) * kSpanTokens;
        const Reach part{max_of(reach.first, start), min_of(reach.last, start + kSpanTokens), find_groups(item, start)};
        // Merging the state of nothing would change none.
        if (part.groups == 0 && work.partial == nullptr && s > 0) continue;
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

// Rows of 128 fill half of a 1 MiB cache with all that they need.
constexpr AttentionKernels attention_kernels = {1 << 14,     INT64_MAX, scratch_floats,
                                                state_floats, attention, attention_merge};

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
