// Where numbers lie in the key-value cache, and how they are packed. See CacheShape.
#pragma once

#include <cstddef>

#include "half.h"
#include "simd.h"
#include "thermocline/dense_kernels.h"

namespace thermocline::THERMOCLINE_SET {
namespace {

constexpr int64_t kQuantBlock = 32;
constexpr int64_t kQuantBytes = 34;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Bytes of one head's numbers of one token.
inline int64_t cache_row_bytes(CacheType type, int64_t head_dim) {
    switch (type) {
        case CacheType::F32: return head_dim * 4;
        case CacheType::Q8_0: return head_dim / kQuantBlock * kQuantBytes;
        default: return head_dim * 2;
    }
}

// Bytes from the cache's start to one head's numbers in one block.
inline int64_t head_offset(const CacheShape& c, int64_t row_bytes, int64_t block, int64_t kv_head) {
    return (block * c.kv_heads + kv_head) * c.block_tokens * row_bytes;
}

// The group of up to sixteen tokens of a block in which a token's keys lie.
struct KeyPlace {
    int64_t group_offset;  // bytes from the head's numbers
    int64_t width, lane;
};

inline KeyPlace key_place(const CacheShape& c, int64_t row_bytes, int64_t token_in_block) {
    const int64_t first = token_in_block / kWidth * kWidth;
    return {first * row_bytes, min_of(kWidth, c.block_tokens - first), token_in_block - first};
}

// One row, packed as the values are: row after row.
inline void pack_q8_0(const float* x, int64_t count, uint8_t* out) {
    for (int64_t b = 0; b < count; b += kQuantBlock, out += kQuantBytes) {
        const Vec low = load(x + b), high = load(x + b + kWidth);
        const float top = reduce_max(max(abs(low), abs(high)));
        const float unit = top / 127.0f;
        const uint16_t half = float_to_half(unit < 65504.0f ? unit : 65504.0f);
        store_u16(out, half);
        // Rounding the unit to a half may leave the largest number a little beyond 127 units.
        const float rounded = half_to_float(half);
        const Vec inverse = broadcast(rounded > 0.0f ? 1.0f / rounded : 0.0f);
        const Vec limit = broadcast(127.0f), floor = broadcast(-127.0f);
        store_i8(out + 2, max(floor, min(limit, mul(low, inverse))));
        store_i8(out + 2 + kWidth, max(floor, min(limit, mul(high, inverse))));
    }
}

// Halves saturate: an outlier beyond 65504 must not turn a whole row of scores into NaN.
inline Vec saturate(Vec x) { return max(broadcast(-65504.0f), min(broadcast(65504.0f), x)); }

inline void pack_row(CacheType type, const float* x, int64_t count, uint8_t* out) {
    int64_t i = 0;
    switch (type) {
        case CacheType::F32: __builtin_memcpy(out, x, static_cast<size_t>(count) * 4); break;
        case CacheType::Q8_0: pack_q8_0(x, count, out); break;
        case CacheType::F16:
            for (; i + kWidth <= count; i += kWidth) store_f16(out + 2 * i, saturate(load(x + i)));
            for (; i < count; ++i) {
                const float low = x[i] < -65504.0f ? -65504.0f : x[i];
                store_u16(out + 2 * i, float_to_half(low > 65504.0f ? 65504.0f : low));
            }
            break;
        case CacheType::BF16:
            for (; i + kWidth <= count; i += kWidth) store_bf16(out + 2 * i, load(x + i));
            for (; i < count; ++i) store_u16(out + 2 * i, float_to_bfloat(x[i]));
            break;
    }
}

template <int Bytes>
inline void scatter(const uint8_t* from, int64_t count, uint8_t* to, int64_t width) {
    for (int64_t i = 0; i < count; ++i) __builtin_memcpy(to + i * width * Bytes, from + i * Bytes, Bytes);
}

// Spreads a packed row over the lanes of its group.
inline void place_key(CacheType type, const uint8_t* row, int64_t head_dim, const KeyPlace& at,
                      uint8_t* group) {
    switch (type) {
        case CacheType::F32: scatter<4>(row, head_dim, group + 4 * at.lane, at.width); break;
        case CacheType::Q8_0:
            for (int64_t b = 0; b < head_dim / kQuantBlock; ++b, row += kQuantBytes) {
                uint8_t* to = group + b * kQuantBytes * at.width;
                __builtin_memcpy(to + 2 * at.lane, row, 2);
                scatter<1>(row + 2, kQuantBlock, to + 2 * at.width + at.lane, at.width);
            }
            break;
        default: scatter<2>(row, head_dim, group + 2 * at.lane, at.width);
    }
}

// One key's number from a group of any width.
inline float read_key(CacheType type, const uint8_t* group, const KeyPlace& at, int64_t d) {
    const int64_t index = d * at.width + at.lane;
    switch (type) {
        case CacheType::F32: {
            float x;
            __builtin_memcpy(&x, group + 4 * index, sizeof x);
            return x;
        }
        case CacheType::F16: return scalar_f16(group + 2 * index);
        case CacheType::BF16: return bfloat_to_float(load_u16(group + 2 * index));
        case CacheType::Q8_0: break;
    }
    const uint8_t* block = group + d / kQuantBlock * kQuantBytes * at.width;
    const auto* numbers = reinterpret_cast<const int8_t*>(block + 2 * at.width);
    return scalar_f16(block + 2 * at.lane) *
           static_cast<float>(numbers[d % kQuantBlock * at.width + at.lane]);
}

// How kernels read sixteen numbers at once. `Row` is one packed row; `Group` is a full group of keys,
// whose units (the factors of its sixteen tokens, for kStep dimensions) are loaded apart. Sixteen
// numbers take kVectorBytes.
template <CacheType Type>
struct Packed {
    static constexpr int64_t kStep = 1 << 30;
    static constexpr int64_t kVectorBytes = Type == CacheType::F32 ? 64 : 32;
    static constexpr int64_t kBytes = Type == CacheType::F32 ? 4 : 2;
    static Vec convert(const uint8_t* p) {
        if constexpr (Type == CacheType::F32) return load(reinterpret_cast<const float*>(p));
        if constexpr (Type == CacheType::F16) return load_f16(p);
        return load_bf16(p);
    }
    static Vec row(const uint8_t* row, int64_t vec) { return convert(row + vec * kWidth * kBytes); }
    static Vec units(const uint8_t*, int64_t) { return zero(); }
    static Vec group(const uint8_t* group, int64_t d, Vec) { return convert(group + d * kWidth * kBytes); }
};

template <>
struct Packed<CacheType::Q8_0> {
    static constexpr int64_t kStep = kQuantBlock;
    static constexpr int64_t kVectorBytes = kQuantBytes / 2;
    static Vec row(const uint8_t* row, int64_t vec) {
        const uint8_t* block = row + vec / 2 * kQuantBytes;
        return mul(load_i8(block + 2 + vec % 2 * kWidth), broadcast(scalar_f16(block)));
    }
    static Vec units(const uint8_t* group, int64_t d) {
        return load_f16(group + d / kQuantBlock * kQuantBytes * kWidth);
    }
    static Vec group(const uint8_t* group, int64_t d, Vec units) {
        const uint8_t* block = group + d / kQuantBlock * kQuantBytes * kWidth;
        return mul(load_i8(block + 2 * kWidth + d % kQuantBlock * kWidth), units);
    }
};

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
