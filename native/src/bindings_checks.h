// Checks that several bindings make of a cache and of the sequences of a chunk.
#pragma once

#include "bindings_compute.h"

namespace thermocline::python {

template <typename T, int N>
using Write = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

template <typename Array>
int64_t size(const Array& array, size_t axis) {
    return static_cast<int64_t>(array.shape(axis));
}

inline void require_below(const int32_t* values, int64_t count, int64_t limit, const char* what) {
    for (int64_t i = 0; i < count; ++i) require(values[i] >= 0 && values[i] < limit, what);
}

template <typename Array>
CacheShape cache_shape(int type, int64_t block_tokens, int64_t head_dim, const Array& keys, const Array& values) {
    CacheShape cache{CacheType::F32, size(keys, 0), block_tokens, size(keys, 1), head_dim};
    require(cache_type(type, cache.type), "no such cache type");
    require(block_tokens > 0, "block_tokens must be positive");
    require(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim out of range");
    require(cache.type != CacheType::Q8_0 || head_dim % 32 == 0,
            "a Q8_0 cache needs a head_dim that 32 divides");
    require(cache.kv_heads > 0, "the cache has no heads");
    for (size_t axis = 0; axis < 2; ++axis)
        require(keys.shape(axis) == values.shape(axis), "keys and values must have the same blocks and heads");
    require(size(keys, 2) == block_tokens * cache_row_bytes(cache.type, head_dim),
            "the cache must be [blocks, kv_heads, bytes of a head's block]");
    // The bytes of a block of values say how many numbers a value has: Q8_0 has 34 bytes for 32 of them.
    const int64_t value_dim = size(values, 2) / block_tokens * 32 / cache_row_bytes(cache.type, 32);
    require(value_dim > 0 && value_dim <= kMaxHeadDim &&
                size(values, 2) == block_tokens * cache_row_bytes(cache.type, value_dim),
            "values must be [blocks, kv_heads, bytes of a head's block]");
    if (value_dim != head_dim) cache.own_value_dim = value_dim;
    return cache;
}

inline void require_spans(const In<int32_t, 1>& starts, int64_t end) {
    require(size(starts, 0) >= 1 && starts.data()[0] == 0, "starts must begin with 0");
    for (int64_t i = 1; i < size(starts, 0); ++i)
        require(starts.data()[i] >= starts.data()[i - 1], "starts must not fall");
    require(starts.data()[size(starts, 0) - 1] == end, "starts must end with the number of entries");
}

inline void require_rule(const RouteRule& rule, int64_t experts) {
    require(rule.chosen >= 1 && rule.chosen <= experts, "at least one and at most all experts are chosen");
    const int gating = static_cast<int>(rule.gating);
    require((gating >= static_cast<int>(Gating::Softmax) && gating <= static_cast<int>(Gating::SqrtSoftplus)) ||
                rule.gating == Gating::NearBest,
            "no such gating");
    require(rule.groups >= 1 && experts % rule.groups == 0, "experts must be a multiple of their groups");
    const int64_t members = experts / rule.groups;
    require(rule.group_best == 1 || rule.group_best == 2, "a group is judged by one or two of its experts");
    require(rule.groups == 1 || members >= rule.group_best, "a group has the experts that it is judged by");
    require(rule.groups_used >= 1 && rule.groups_used <= rule.groups && rule.chosen <= rule.groups_used * members,
            "the groups that are used must have the chosen experts");
}

inline void require_rotary(const In<float, 2>& cosines, const In<float, 2>& sines, int64_t tokens, int64_t head_dim) {
    for (const auto* table : {&cosines, &sines})
        require(size(*table, 0) == tokens && size(*table, 1) == size(cosines, 1),
                "cosines and sines must be [tokens, rotary_dims / 2]");
    require(2 * size(cosines, 1) <= head_dim, "rotary_dims must be at most head_dim");
}

inline void require_slots(const In<int32_t, 1>& slots, int64_t tokens, const CacheShape& cache) {
    require(size(slots, 0) == tokens, "slots must have one entry per token");
    require_below(slots.data(), tokens, cache.num_blocks * cache.block_tokens, "a slot lies beyond the cache");
}

// Sequence s has tokens [starts[s], starts[s + 1]) and the blocks
// block_tables[table_starts[s]:table_starts[s + 1]], which hold all its positions.
inline void require_sequences(const CacheShape& cache, const In<int32_t, 1>& positions, const In<int32_t, 1>& starts,
                              const In<int32_t, 1>& block_tables, const In<int32_t, 1>& table_starts) {
    require_spans(starts, size(positions, 0));
    require_spans(table_starts, size(block_tables, 0));
    require(size(table_starts, 0) == size(starts, 0), "starts and table_starts differ in length");
    require_below(block_tables.data(), size(block_tables, 0), cache.num_blocks, "a block lies beyond the cache");
    for (int64_t s = 0; s + 1 < size(starts, 0); ++s) {
        const int64_t first = starts.data()[s], tokens = starts.data()[s + 1] - first;
        const int64_t blocks = table_starts.data()[s + 1] - table_starts.data()[s];
        require_below(positions.data() + first, tokens, blocks * cache.block_tokens,
                      "a position lies beyond the block table");
    }
}

}  // namespace thermocline::python
