// Half and bfloat16 numbers in plain integer arithmetic: for sets without such instructions, and for
// single numbers everywhere.
#pragma once

#include <cstdint>

namespace thermocline::THERMOCLINE_SET {
namespace {

inline uint16_t load_u16(const void* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return bits;
}
inline void store_u16(void* p, uint16_t bits) { __builtin_memcpy(p, &bits, sizeof bits); }
inline float from_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

// The exponent is moved by a product with 2^112, which also makes subnormal halves normal.
inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const uint32_t special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    const uint32_t finite = to_bits(from_bits(magnitude) * from_bits(0x77800000u));
    return from_bits(finite | special | (half & 0x8000u) << 16);
}

// Rounds to nearest, ties to even; beyond 65504 is infinity.
inline uint16_t float_to_half(float x) {
    const uint32_t bits = to_bits(x);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u | (magnitude >> 13 & 0x3ffu);
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) {
        // Below the smallest normal half the unit is 2^-24: that of a float between 0.5 and 1.
        const uint32_t aligned = to_bits(from_bits(magnitude) + 0.5f);
        return static_cast<uint16_t>(sign | (aligned - 0x3f000000u));
    }
    const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<uint16_t>(sign | rounded >> 13);
}

inline float bfloat_to_float(uint16_t bfloat) { return from_bits(static_cast<uint32_t>(bfloat) << 16); }

// Rounds to nearest, ties to even.
inline uint16_t float_to_bfloat(float x) {
    const uint32_t bits = to_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
