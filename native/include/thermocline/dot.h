// The one order in which products are added, and the macro that compiles a function per CPU level.
//
// Sixteen running sums, element k goes to sum k % 16, the sums are folded 8, 4, 2, 1. The order does
// not depend on the instruction set (a wider register only holds more of the sixteen), so every x86
// level, and the NumPy twin, give the same bits.
#pragma once

#include <cstdint>

// The clones name features, not CPU models: "arch=skylake-avx512" is matched by model and leaves a
// Cascade Lake with the baseline (measured: 7 instead of 31 GFLOP/s on one core).
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define THERMOCLINE_CLONES \
    __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define THERMOCLINE_CLONES
#endif

namespace thermocline {

constexpr int kLanes = 16;

// Sixteen floats; the compiler splits them into what the instruction set has. Loads need no alignment.
typedef float Lanes __attribute__((vector_size(64)));
typedef float UnalignedLanes __attribute__((vector_size(64), aligned(4), may_alias));

inline __attribute__((always_inline)) float fold(const Lanes& lanes) {
    float s[8];
    for (int j = 0; j < 8; ++j) s[j] = lanes[j] + lanes[j + 8];
    for (int j = 0; j < 4; ++j) s[j] += s[j + 4];
    for (int j = 0; j < 2; ++j) s[j] += s[j + 2];
    return s[0] + s[1];
}

// M x N dot products: M rows of `a` with N rows of `b`, out[m * out_stride + n]. One load serves
// several products, and every product still adds in the order above.
template <int M, int N>
inline __attribute__((always_inline)) void dot_tile(const float* a, int64_t a_stride, const float* b,
                                                    int64_t b_stride, int64_t count, float* out,
                                                    int64_t out_stride) {
    Lanes acc[M][N] = {};
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) {
        Lanes right[N];
        for (int n = 0; n < N; ++n)
            right[n] = *reinterpret_cast<const UnalignedLanes*>(b + n * b_stride + k);
        for (int m = 0; m < M; ++m) {
            const Lanes left = *reinterpret_cast<const UnalignedLanes*>(a + m * a_stride + k);
            for (int n = 0; n < N; ++n) acc[m][n] += left * right[n];
        }
    }
    for (int j = 0; k + j < count; ++j)
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) acc[m][n][j] += a[m * a_stride + k + j] * b[n * b_stride + k + j];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) out[m * out_stride + n] = fold(acc[m][n]);
}

}  // namespace thermocline
