// One vector type, `Vec`, of sixteen floats, on every instruction set. Included by files that are
// compiled once per set; the set's .cpp defines
//   THERMOCLINE_SET     the set's namespace, and
//   THERMOCLINE_SIMD_AVX512, _AVX2 or _NEON; none of them selects the portable form.
// Everything has internal linkage, so that no inline function of one set can replace another's.
//
// Every set offers, with lane i of sixteen meaning element i:
//   zero broadcast load store        loads and stores need no alignment
//   load_part store_part             the first n lanes, 0 <= n <= 16; lanes not loaded are 0
//   add sub mul div max min abs      max and min return their second operand when it is NaN
//   sqrt                             rounded as IEEE says
//   fma(a, b, c) = a * b + c         one rounding where the hardware has it, two in the portable set
//   fnma(a, b, c) = c - a * b
//   round_even
//   scale_by_power                   x * 2^n for whole n in kLowestPower..128; the lowest gives 0
//   where_less(a, b, yes, no)        per lane a < b ? yes : no
//   copy_sign(magnitude, sign)       for magnitudes that are not negative
//   keep_lanes(x, begin, end, other) lanes outside of [begin, end) become `other`
//   keep_bits(x, bits, other)        lanes whose bit of `bits` is not set become `other`
//   reduce_add reduce_max            lanes are folded 8, 4, 2, 1
//   load_f16 store_f16 load_bf16 store_bf16 load_i8
//   scalar_f16 broadcast_f16         one half as a float, in one lane or in all
//   store_i8                         whole numbers in -128..127
//   Doubles                          sixteen double sums: zero_doubles, add_squares, reduce_add
#pragma once

#if defined(THERMOCLINE_SIMD_AVX512)
#include "simd_avx512.h"
#elif defined(THERMOCLINE_SIMD_AVX2)
#include "simd_avx2.h"
#elif defined(THERMOCLINE_SIMD_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace thermocline::THERMOCLINE_SET {
namespace {

constexpr int kWidth = 16;

template <int N>
inline Vec polynomial(const float (&coefficients)[N], Vec x) {
    Vec y = broadcast(coefficients[N - 1]);
#pragma GCC unroll 16
    for (int i = N - 2; i >= 0; --i) y = fma(y, x, broadcast(coefficients[i]));
    return y;
}

// 2^x with a relative error below 1.5e-7; 0 for -infinity; exactly 1 for 0;
// subnormal results may be 0, and those above 2^127.5 infinite. Minimax on [-1/2, 1/2] after taking the
// whole part away exactly.
inline Vec exp2(Vec x) {
    constexpr float kTerms[] = {0.693147182f,   0.240226477f,   0.0555033237f,
                                0.00961843785f, 0.00133989006f, 0.000153533416f};
    // NaN is the second operand, and stays.
    x = min(broadcast(128.0f), max(broadcast(kLowestPower), x));
    const Vec whole = round_even(x);
    const Vec rest = sub(x, whole);
    return scale_by_power(fma(polynomial(kTerms, rest), rest, broadcast(1.0f)), whole);
}

// e^x with a relative error below 2e-7, and the same ends as exp2. The logarithm of two is taken
// away in two parts, the first with so few bits that its multiples are exact.
inline Vec exp(Vec x) {
    constexpr float kTerms[] = {0.49999994f, 0.166665211f, 0.041668389f, 0.0083687352f, 0.00138145592f};
    x = min(broadcast(89.0f), max(broadcast(kLowestPower * 0.693147182f), x));
    const Vec whole = min(round_even(mul(x, broadcast(1.44269504f))), broadcast(128.0f));
    Vec rest = fnma(whole, broadcast(0.693359375f), x);
    rest = fnma(whole, broadcast(-2.12194440e-4f), rest);
    const Vec tail = fma(polynomial(kTerms, rest), mul(rest, rest), rest);
    return scale_by_power(add(tail, broadcast(1.0f)), whole);
}

// Relative error below 3e-7: a minimax polynomial where 1 - e^-2x would cancel.
inline Vec tanh(Vec x) {
    constexpr float kTerms[] = {-0.333332807f, 0.133314416f, -0.0537397154f, 0.0206390861f, -0.0057049864f};
    const Vec square = mul(x, x);
    const Vec near = fma(mul(x, square), polynomial(kTerms, square), x);
    const Vec decay = exp(mul(abs(x), broadcast(-2.0f)));
    const Vec one = broadcast(1.0f);
    const Vec far = copy_sign(div(sub(one, decay), add(one, decay)), x);
    return where_less(abs(x), broadcast(0.625f), near, far);
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
