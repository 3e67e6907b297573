// Where the keys and values of a block come from: as they lie in the cache, or as floats in scratch, made of the cache's
// numbers or of a latent cache's rows.
#pragma once

#include "attention_expand.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

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

// Whether an item's rows read anything of group g of the block at `base`, and of the whole block.
inline bool reads_group(const Reach& reach, int64_t base, int g) {
    return (reach.groups >> (span_group(base) + g) & 1u) != 0;
}
inline bool reads_block(const Reach& reach, int64_t base) {
    return (reach.groups >> span_group(base) & ((1u << kGroups) - 1)) != 0;
}

// A position of the group that is read as many groups behind `place` as a block has, or of the last that is read.
inline int64_t further_on(const Reach& reach, int64_t place) {
    const int behind = span_group(place) + 1;
    uint32_t groups = behind < kSpanWords ? reach.groups >> behind : 0;
    for (int i = 1; i < kGroups; ++i) groups &= groups - 1;
    const int to = groups == 0 ? kSpanWords - 1 - __builtin_clz(reach.groups) : behind + __builtin_ctz(groups);
    return min_of(place / kSpanTokens * kSpanTokens + to * kWidth, reach.last - 1) / kWidth * kWidth;
}

// Whether keys and values can be read by vectors as they lie in the cache.
inline bool lies_in_vectors(const CacheShape& c) {
    return c.latent == 0 && c.block_tokens % kWidth == 0 && c.head_dim % kWidth == 0 && c.value_dim() % kWidth == 0;
}

// Groups with positions of `reach` that are read, as they lie in the cache.
inline KeyBlock block_in_cache(const AttentionJob& job, int64_t row_bytes, int64_t kv_head, int64_t base,
                               const Reach& reach) {
    KeyBlock b = empty_block(base, reach);
    b.value_bytes = cache_row_bytes(job.cache.type, job.cache.value_dim());
    for (int g = b.first_group; g < b.last_group; ++g) {
        if (!reads_group(reach, base, g)) continue;
        const int64_t place = base + g * kWidth;
        b.keys[g] = job.keys + row_offset(job, row_bytes, kv_head, place);
        b.values[g] = job.values + row_offset(job, b.value_bytes, kv_head, place);
    }
    for (int g = 0; g < kGroups; ++g)
        b.next_keys[g] = job.keys + row_offset(job, row_bytes, kv_head, further_on(reach, base + g * kWidth));
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

// Rows of a latent cache, wherever they lie: up to four positions that follow each other, as keys and values of a block in
// scratch.
struct LatentRows {
    const uint8_t* rows[4];
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
            store(rows[p], row_vector<Type>(from.rows[p], from.row_bytes, from.dim, vec));
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
    LatentRows from{{}, row_bytes, 0, c.head_dim, c.latent, panel, 0, nullptr, values};
    for (int64_t p = first; p < last; p += from.count) {
        from.count = min_of(4, last - p);
        for (int64_t i = 0; i < from.count; ++i) from.rows[i] = job.keys + row_offset(job, row_bytes, 0, p + i);
        from.place = p - base;
        from.keys = keys + p % kWidth;
        convert.latent(from);
    }
}

// Where a block's keys and values go as floats, see InScratch.
struct BlockMemory {
    float* keys;
    float* values;
    int panel;  // vectors of values that lie together
};

// Numbers of a group's keys, and of a position's values, in scratch: where they are made, some beyond the last are written.
inline int64_t scratch_key_dim(const AttentionJob& job) { return job.key_dim() + (job.expansion ? 2 * kWidth : 0); }
inline int64_t scratch_value_dim(const AttentionJob& job) { return round_up(job.value_dim(), 2 * kWidth); }

inline int64_t block_floats(const AttentionJob& job) {
    return kKeyBlock * (scratch_key_dim(job) + scratch_value_dim(job));
}

inline BlockMemory block_memory(const AttentionJob& job, int panel, float* scratch) {
    return {scratch, scratch + kKeyBlock * scratch_key_dim(job), panel};
}

// The keys and values of one head for a block, made of a latent cache's rows.
inline KeyBlock block_expanded(const AttentionJob& job, int64_t row_bytes, int64_t base, const Reach& reach,
                               const ExpandedHead& head, const BlockMemory& memory) {
    const Converters convert = converters_of(job.cache.type);
    const int panel = memory.panel;
    KeyBlock b = empty_block(base, reach);
    for (int g = b.first_group; g < b.last_group; ++g) {
        const int64_t place = base + g * kWidth;
        const int64_t first = max_of(reach.first, place), last = min_of(reach.last, place + kWidth);
        latent_in_scratch(job, row_bytes, convert, panel, base, first, last, head.group(g), nullptr);
        b.keys[g] = reinterpret_cast<const uint8_t*>(memory.keys + g * head.key_stride);
        b.values[g] = reinterpret_cast<const uint8_t*>(memory.values);
    }
    expand_keys(head, b.first_group, b.last_group, memory.keys);
    expand_values(head, b.first_group, b.last_group, panel, memory.values);
    return b;
}

// The block's keys and values as floats in scratch, those of groups that are read.
inline KeyBlock block_in_scratch(const AttentionJob& job, int64_t row_bytes, int64_t kv_head, int64_t base,
                                 const Reach& reach, const BlockMemory& memory) {
    const int64_t dim = job.cache.head_dim, value_dim = job.cache.value_dim();
    const int64_t value_bytes = cache_row_bytes(job.cache.type, value_dim);
    const Converters convert = converters_of(job.cache.type);
    const int panel = memory.panel;
    const auto convert_values = [&](int64_t first, int64_t count) {
        convert.rows(job.values + row_offset(job, value_bytes, kv_head, first), value_bytes, count, value_dim, panel,
                     first - base, memory.values);
    };
    const bool whole_groups = job.cache.block_tokens % kWidth == 0;
    KeyBlock b = empty_block(base, reach);
    for (int g = b.first_group; g < b.last_group; ++g) {
        if (!reads_group(reach, base, g)) continue;
        const int64_t place = base + g * kWidth;
        const int64_t first = max_of(reach.first, place), last = min_of(reach.last, place + kWidth);
        float* const keys = memory.keys + g * kWidth * dim;
        b.keys[g] = reinterpret_cast<const uint8_t*>(keys);
        // A group's place depends on the panel's width, so positions count from the block's start.
        b.values[g] = reinterpret_cast<const uint8_t*>(memory.values);
        if (job.cache.latent > 0) {
            latent_in_scratch(job, row_bytes, convert, panel, base, first, last, keys, memory.values);
            continue;
        }
        if (whole_groups) {
            convert.group(job.keys + row_offset(job, row_bytes, kv_head, place), dim, keys);
            convert_values(first, last - first);
            continue;
        }
        for (int64_t p = first; p < last; ++p) {
            convert_key(job, row_bytes, kv_head, p, keys + p % kWidth);
            convert_values(p, 1);
        }
    }
    return b;
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
