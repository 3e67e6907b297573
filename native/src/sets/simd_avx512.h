// Sixteen floats in one 512-bit register. See simd.h for what each function must do.
#pragma once

// g++ 12 takes the undefined upper operand inside these intrinsics for a mistake of the caller.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

namespace thermocline::THERMOCLINE_SET {
namespace {

using Vec = __m512;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline __mmask16 lanes_below(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline Vec load_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
inline void store_part(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, lanes_below(n), x); }

inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec sqrt(Vec x) { return _mm512_sqrt_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
// The hardware returns the second operand when either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec x) { return _mm512_abs_ps(x); }
inline Vec round_even(Vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// scale_by_power takes any power: far below the smallest number all is 0.
constexpr float kLowestPower = -160.0f;
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline Vec copy_sign(Vec magnitude, Vec sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
inline Vec keep_lanes(Vec x, int64_t begin, int64_t end, float other) {
    const auto kept = static_cast<__mmask16>(lanes_below(end) & ~lanes_below(begin));
    return _mm512_mask_blend_ps(kept, _mm512_set1_ps(other), x);
}
inline Vec keep_bits(Vec x, uint32_t bits, float other) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), _mm512_set1_ps(other), x);
}

inline float reduce_add(Vec x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float reduce_max(Vec x) {
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

inline Vec load_f16(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline void store_f16(void* p, Vec x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline float scalar_f16(const void* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
}
inline Vec broadcast_f16(const void* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
}
inline Vec load_bf16(const void* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store_bf16(void* p, Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), up, quiet);
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
inline Vec load_i8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline void store_i8(void* p, Vec x) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

struct Doubles {
    __m512d low, high;
};
inline Doubles zero_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline Doubles add_squares(Doubles sum, Vec x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
}
inline double reduce_add(Doubles x) {
    const __m512d a = _mm512_add_pd(x.low, x.high);
    const __m256d b = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
    const __m128d c = _mm_add_pd(_mm256_castpd256_pd128(b), _mm256_extractf128_pd(b, 1));
    return _mm_cvtsd_f64(_mm_add_sd(c, _mm_unpackhi_pd(c, c)));
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
