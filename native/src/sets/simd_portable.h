// Sixteen floats as four vectors of four, which every compiler maps to the baseline's registers
// (SSE2, NEON) or to plain code. A fused multiply-add is a product and a sum, each rounded.
// See simd.h for what each function must do.
#pragma once

#include <cstdint>

#include "half.h"

namespace thermocline::THERMOCLINE_SET {
namespace {

typedef float Quad __attribute__((vector_size(16)));
typedef float UnalignedQuad __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t IntQuad __attribute__((vector_size(16)));
typedef uint16_t HalfQuad __attribute__((vector_size(8)));
typedef int8_t ByteQuad __attribute__((vector_size(4)));

struct Vec {
    Quad part[4];
};

template <typename F>
inline __attribute__((always_inline)) Vec each_quad(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
inline Quad select(IntQuad mask, Quad yes, Quad no) {
    return (Quad)((mask & (IntQuad)yes) | (~mask & (IntQuad)no));
}

inline Vec zero() { return {}; }
inline Vec broadcast(float x) {
    const Quad q = {x, x, x, x};
    return {{q, q, q, q}};
}
inline Vec load(const float* p) {
    return each_quad([&](int i) { return *reinterpret_cast<const UnalignedQuad*>(p + 4 * i); });
}
inline void store(float* p, Vec x) {
    for (int i = 0; i < 4; ++i) *reinterpret_cast<UnalignedQuad*>(p + 4 * i) = x.part[i];
}
inline Vec load_part(const float* p, int64_t n) {
    float whole[16] = {};
    for (int64_t i = 0; i < n; ++i) whole[i] = p[i];
    return load(whole);
}
inline void store_part(float* p, Vec x, int64_t n) {
    float whole[16];
    store(whole, x);
    for (int64_t i = 0; i < n; ++i) p[i] = whole[i];
}

inline Vec add(Vec a, Vec b) { return each_quad([&](int i) { return a.part[i] + b.part[i]; }); }
inline Vec sub(Vec a, Vec b) { return each_quad([&](int i) { return a.part[i] - b.part[i]; }); }
inline Vec mul(Vec a, Vec b) { return each_quad([&](int i) { return a.part[i] * b.part[i]; }); }
inline Vec div(Vec a, Vec b) { return each_quad([&](int i) { return a.part[i] / b.part[i]; }); }
inline Vec sqrt(Vec x) {
    for (int i = 0; i < 16; ++i) x.part[i / 4][i % 4] = __builtin_sqrtf(x.part[i / 4][i % 4]);
    return x;
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return each_quad([&](int i) { return a.part[i] * b.part[i] + c.part[i]; });
}
inline Vec fnma(Vec a, Vec b, Vec c) {
    return each_quad([&](int i) { return c.part[i] - a.part[i] * b.part[i]; });
}
inline Vec max(Vec a, Vec b) {
    return each_quad([&](int i) { return select(a.part[i] > b.part[i], a.part[i], b.part[i]); });
}
inline Vec min(Vec a, Vec b) {
    return each_quad([&](int i) { return select(a.part[i] < b.part[i], a.part[i], b.part[i]); });
}
inline Vec abs(Vec x) {
    return each_quad([&](int i) { return (Quad)((IntQuad)x.part[i] & 0x7fffffff); });
}
// Adding and taking away 1.5 * 2^23 drops the fraction, to even; larger numbers have none.
inline Vec round_even(Vec x) {
    const Vec magic = broadcast(12582912.0f);
    const Vec rounded = sub(add(x, magic), magic);
    return each_quad([&](int i) {
        const IntQuad small = (Quad)((IntQuad)x.part[i] & 0x7fffffff) < 4194304.0f;
        return select(small, rounded.part[i], x.part[i]);
    });
}
// The exponent field of 2^-127 is 0, and so is the product.
constexpr float kLowestPower = -127.0f;
inline Vec scale_by_power(Vec x, Vec n) {
    return each_quad([&](int i) {
        const IntQuad power = __builtin_convertvector(n.part[i], IntQuad);
        return x.part[i] * (Quad)((power + 127) << 23);
    });
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return each_quad([&](int i) { return select(a.part[i] < b.part[i], yes.part[i], no.part[i]); });
}
inline Vec copy_sign(Vec magnitude, Vec sign) {
    return each_quad([&](int i) {
        const IntQuad bit = (IntQuad)sign.part[i] & static_cast<int32_t>(0x80000000);
        return (Quad)((IntQuad)magnitude.part[i] | bit);
    });
}
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, float other) {
    const auto low = static_cast<int32_t>(begin), high = static_cast<int32_t>(end);
    return each_quad([&](int i) {
        const IntQuad lane = IntQuad{0, 1, 2, 3} + 4 * i;
        return select((lane >= low) & (lane < high), x.part[i], Quad{other, other, other, other});
    });
}
inline Vec keep_bits(Vec x, uint32_t bits, float other) {
    return each_quad([&](int i) {
        const auto quad = static_cast<int32_t>(bits >> (4 * i));
        const IntQuad kept = (IntQuad{quad, quad, quad, quad} & IntQuad{1, 2, 4, 8}) != 0;
        return select(kept, x.part[i], Quad{other, other, other, other});
    });
}

inline float reduce_add(Vec x) {
    const Quad a = (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
    return (a[0] + a[2]) + (a[1] + a[3]);
}
inline float reduce_max(Vec x) {
    float best = x.part[0][0];
    for (int i = 1; i < 16; ++i) best = x.part[i / 4][i % 4] > best ? x.part[i / 4][i % 4] : best;
    return best;
}

inline float scalar_f16(const void* p) { return half_to_float(load_u16(p)); }
// Four small integers from memory, each in a lane of its own.
template <typename Small>
inline IntQuad widen(const void* p, int quad) {
    Small small;
    __builtin_memcpy(&small, static_cast<const uint8_t*>(p) + quad * sizeof small, sizeof small);
    return __builtin_convertvector(small, IntQuad);
}
// As half_to_float, four at a time.
inline Vec load_f16(const void* p) {
    return each_quad([&](int i) {
        const IntQuad half = widen<HalfQuad>(p, i);
        const float scale = from_bits(0x77800000u);
        const IntQuad special = ((half & 0x7c00) == 0x7c00) & 0x7f800000;
        const IntQuad finite = (IntQuad)((Quad)((half & 0x7fff) << 13) * scale);
        return (Quad)(finite | special | (half & 0x8000) << 16);
    });
}
inline void store_f16(void* p, Vec x) {
    for (int i = 0; i < 16; ++i)
        store_u16(static_cast<uint8_t*>(p) + 2 * i, float_to_half(x.part[i / 4][i % 4]));
}
inline Vec broadcast_f16(const void* p) { return broadcast(scalar_f16(p)); }
inline Vec load_bf16(const void* p) {
    return each_quad([&](int i) { return (Quad)(widen<HalfQuad>(p, i) << 16); });
}
inline void store_bf16(void* p, Vec x) {
    for (int i = 0; i < 16; ++i)
        store_u16(static_cast<uint8_t*>(p) + 2 * i, float_to_bfloat(x.part[i / 4][i % 4]));
}
inline Vec load_i8(const void* p) {
    return each_quad([&](int i) { return __builtin_convertvector(widen<ByteQuad>(p, i), Quad); });
}
inline void store_i8(void* p, Vec x) {
    const Vec whole = round_even(x);
    for (int i = 0; i < 16; ++i)
        static_cast<int8_t*>(p)[i] = static_cast<int8_t>(whole.part[i / 4][i % 4]);
}

struct Doubles {
    double lane[16];
};
inline Doubles zero_doubles() { return {}; }
inline Doubles add_squares(Doubles sum, Vec x) {
    for (int i = 0; i < 16; ++i) {
        const double wide = x.part[i / 4][i % 4];
        sum.lane[i] += wide * wide;
    }
    return sum;
}
inline double reduce_add(Doubles x) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.lane[i] += x.lane[i + width];
    return x.lane[0];
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
