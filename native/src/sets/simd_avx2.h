// Sixteen floats in two 256-bit registers. See simd.h for what each function must do.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace thermocline::THERMOCLINE_SET {
namespace {

struct Vec {
    __m256 low, high;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec broadcast(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
// All bits set in each of eight lanes first..first + 7 that is smaller than n.
inline __m256i lanes_below(int64_t n, int first) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n) - first), lane);
}
inline Vec load_part(const float* p, int64_t n) {
    return {_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
}
inline void store_part(float* p, Vec x, int64_t n) {
    _mm256_maskstore_ps(p, lanes_below(n, 0), x.low);
    _mm256_maskstore_ps(p + 8, lanes_below(n, 8), x.high);
}

inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vec sqrt(Vec x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec fnma(Vec a, Vec b, Vec c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
// The hardware returns the second operand when either is NaN.
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Vec abs(Vec x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Vec round_even(Vec x) {
    return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// The exponent field of 2^-127 is 0, and so is the product.
constexpr float kLowestPower = -127.0f;
inline __m256 power_of_two(__m256 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Vec scale_by_power(Vec x, Vec n) {
    return {_mm256_mul_ps(x.low, power_of_two(n.low)), _mm256_mul_ps(x.high, power_of_two(n.high))};
}
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
inline Vec copy_sign(Vec magnitude, Vec sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(magnitude.low, _mm256_and_ps(sign.low, bit)),
            _mm256_or_ps(magnitude.high, _mm256_and_ps(sign.high, bit))};
}
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, float other) {
    const __m256 rest = _mm256_set1_ps(other);
    const __m256i low = _mm256_andnot_si256(lanes_below(begin, 0), lanes_below(end, 0));
    const __m256i high = _mm256_andnot_si256(lanes_below(begin, 8), lanes_below(end, 8));
    return {_mm256_blendv_ps(rest, x.low, _mm256_castsi256_ps(low)),
            _mm256_blendv_ps(rest, x.high, _mm256_castsi256_ps(high))};
}
// All bits set in each of eight lanes first..first + 7 whose bit is set.
inline __m256i lanes_of_bits(uint32_t bits, int first) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits >> first)), lane), lane);
}
inline Vec keep_bits(Vec x, uint32_t bits, float other) {
    const __m256 rest = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(rest, x.low, _mm256_castsi256_ps(lanes_of_bits(bits, 0))),
            _mm256_blendv_ps(rest, x.high, _mm256_castsi256_ps(lanes_of_bits(bits, 8)))};
}

inline float reduce_add(Vec x) {
    const __m256 a = _mm256_add_ps(x.low, x.high);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float reduce_max(Vec x) {
    const __m256 a = _mm256_max_ps(x.low, x.high);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

inline Vec load_f16(const void* p) {
    const auto* halves = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline void store_f16(void* p, Vec x) {
    auto* halves = static_cast<__m128i*>(p);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}
inline float scalar_f16(const void* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
}
inline Vec broadcast_f16(const void* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    const __m256 v = _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(bits)));
    return {v, v};
}
inline __m256 widen_bf16(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vec load_bf16(const void* p) {
    const auto* halves = static_cast<const __m128i*>(p);
    return {widen_bf16(_mm_loadu_si128(halves)), widen_bf16(_mm_loadu_si128(halves + 1))};
}
inline __m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}
inline void store_bf16(void* p, Vec x) {
    const __m256i mixed = _mm256_packus_epi32(round_bf16(x.low), round_bf16(x.high));
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
inline Vec load_i8(const void* p) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store_i8(void* p, Vec x) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    const __m256i words = _mm256_permute4x64_epi64(mixed, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
}

struct Doubles {
    __m256d part[4];
};
inline Doubles zero_doubles() { return {}; }
inline Doubles add_squares(Doubles sum, Vec x) {
    const __m128 quarter[4] = {_mm256_castps256_ps128(x.low), _mm256_extractf128_ps(x.low, 1),
                               _mm256_castps256_ps128(x.high), _mm256_extractf128_ps(x.high, 1)};
    for (int i = 0; i < 4; ++i) {
        const __m256d wide = _mm256_cvtps_pd(quarter[i]);
        sum.part[i] = _mm256_fmadd_pd(wide, wide, sum.part[i]);
    }
    return sum;
}
inline double reduce_add(Doubles x) {
    const __m256d a = _mm256_add_pd(_mm256_add_pd(x.part[0], x.part[2]), _mm256_add_pd(x.part[1], x.part[3]));
    const __m128d c = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(c, _mm_unpackhi_pd(c, c)));
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
