// Sixteen floats in four 128-bit registers (AArch64). See simd.h for what each function must do.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "half.h"

namespace thermocline::THERMOCLINE_SET {
namespace {

struct Vec {
    float32x4_t part[4];
};

template <typename F>
inline __attribute__((always_inline)) Vec each_quad(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}

inline Vec broadcast(float x) {
    const float32x4_t q = vdupq_n_f32(x);
    return {{q, q, q, q}};
}
inline Vec zero() { return broadcast(0.0f); }
inline Vec load(const float* p) {
    return each_quad([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, Vec x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.part[i]);
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

inline Vec add(Vec a, Vec b) {
    return each_quad([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}
inline Vec sub(Vec a, Vec b) {
    return each_quad([&](int i) { return vsubq_f32(a.part[i], b.part[i]); });
}
inline Vec mul(Vec a, Vec b) {
    return each_quad([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
inline Vec div(Vec a, Vec b) {
    return each_quad([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
}
inline Vec sqrt(Vec x) {
    return each_quad([&](int i) { return vsqrtq_f32(x.part[i]); });
}
inline Vec fma(Vec a, Vec b, Vec c) {
    return each_quad([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}
inline Vec fnma(Vec a, Vec b, Vec c) {
    return each_quad([&](int i) { return vfmsq_f32(c.part[i], a.part[i], b.part[i]); });
}
inline Vec max(Vec a, Vec b) {
    return each_quad([&](int i) { return vmaxq_f32(a.part[i], b.part[i]); });
}
inline Vec min(Vec a, Vec b) {
    return each_quad([&](int i) { return vminq_f32(a.part[i], b.part[i]); });
}
inline Vec abs(Vec x) {
    return each_quad([&](int i) { return vabsq_f32(x.part[i]); });
}
inline Vec round_even(Vec x) {
    return each_quad([&](int i) { return vrndnq_f32(x.part[i]); });
}
// The exponent field of 2^-127 is 0, and so is the product.
constexpr float kLowestPower = -127.0f;
inline Vec scale_by_power(Vec x, Vec n) {
    return each_quad([&](int i) {
        const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n.part[i]), vdupq_n_s32(127));
        return vmulq_f32(x.part[i], vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
    });
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return each_quad(
        [&](int i) { return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), yes.part[i], no.part[i]); });
}
inline Vec copy_sign(Vec magnitude, Vec sign) {
    const uint32x4_t bit = vdupq_n_u32(0x80000000u);
    return each_quad([&](int i) { return vbslq_f32(bit, sign.part[i], magnitude.part[i]); });
}
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, float other) {
    const int32_t first[4] = {0, 1, 2, 3};
    const int32x4_t low = vdupq_n_s32(static_cast<int32_t>(begin));
    const int32x4_t high = vdupq_n_s32(static_cast<int32_t>(end));
    return each_quad([&](int i) {
        const int32x4_t lane = vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * i));
        const uint32x4_t kept = vandq_u32(vcgeq_s32(lane, low), vcltq_s32(lane, high));
        return vbslq_f32(kept, x.part[i], vdupq_n_f32(other));
    });
}
inline Vec keep_bits(Vec x, uint32_t bits, float other) {
    const uint32_t first[4] = {1, 2, 4, 8};
    return each_quad([&](int i) {
        const uint32x4_t kept = vtstq_u32(vdupq_n_u32(bits >> (4 * i)), vld1q_u32(first));
        return vbslq_f32(kept, x.part[i], vdupq_n_f32(other));
    });
}

inline float reduce_add(Vec x) {
    const float32x4_t a =
        vaddq_f32(vaddq_f32(x.part[0], x.part[2]), vaddq_f32(x.part[1], x.part[3]));
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
inline float reduce_max(Vec x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.part[0], x.part[2]), vmaxq_f32(x.part[1], x.part[3])));
}

inline float scalar_f16(const void* p) { return half_to_float(load_u16(p)); }
inline Vec load_f16(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    return each_quad([&](int i) {
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(bytes + 8 * i)));
    });
}
inline void store_f16(void* p, Vec x) {
    for (int i = 0; i < 4; ++i)
        vst1_u8(static_cast<uint8_t*>(p) + 8 * i, vreinterpret_u8_f16(vcvt_f16_f32(x.part[i])));
}
inline Vec broadcast_f16(const void* p) {
    const float32x4_t q = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_u16(p))));
    return {{q, q, q, q}};
}
inline Vec load_bf16(const void* p) {
    const auto* bytes = static_cast<const uint8_t*>(p);
    return each_quad([&](int i) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(bytes + 8 * i)), 16));
    });
}
inline void store_bf16(void* p, Vec x) {
    for (int i = 0; i < 16; ++i)
        store_u16(static_cast<uint8_t*>(p) + 2 * i, float_to_bfloat(x.part[i / 4][i % 4]));
}
inline Vec load_i8(const void* p) {
    const int8x16_t bytes = vld1q_s8(static_cast<const int8_t*>(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
             vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline void store_i8(void* p, Vec x) {
    int16x4_t words[4];
    for (int i = 0; i < 4; ++i) words[i] = vqmovn_s32(vcvtnq_s32_f32(x.part[i]));
    const int8x8_t low = vqmovn_s16(vcombine_s16(words[0], words[1]));
    const int8x8_t high = vqmovn_s16(vcombine_s16(words[2], words[3]));
    vst1q_s8(static_cast<int8_t*>(p), vcombine_s8(low, high));
}

struct Doubles {
    float64x2_t part[8];
};
inline Doubles zero_doubles() {
    Doubles out;
    for (auto& part : out.part) part = vdupq_n_f64(0.0);
    return out;
}
inline Doubles add_squares(Doubles sum, Vec x) {
    for (int i = 0; i < 4; ++i) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(x.part[i]));
        const float64x2_t high = vcvt_high_f64_f32(x.part[i]);
        sum.part[2 * i] = vfmaq_f64(sum.part[2 * i], low, low);
        sum.part[2 * i + 1] = vfmaq_f64(sum.part[2 * i + 1], high, high);
    }
    return sum;
}
inline double reduce_add(Doubles x) {
    for (int width = 4; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.part[i] = vaddq_f64(x.part[i], x.part[i + width]);
    return vgetq_lane_f64(x.part[0], 0) + vgetq_lane_f64(x.part[0], 1);
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
