// The one order in which products are added, and the macro that compiles a function per CPU level.
//
// Sixteen running sums, element k goes to sum k % 16, the sums are folded 8, 4, 2, 1. The order does
// not depend on the instruction set (a wider register only holds more of the sixteen), so every x86
// level, and the NumPy twin, give the same bits.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define THERMOCLINE_CLONES \
    __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define THERMOCLINE_CLONES
#endif

namespace thermocline {

constexpr int kLanes = 16;

inline __attribute__((always_inline)) float fold(const float* lanes) {
    float s[8];
    for (int j = 0; j < 8; ++j) s[j] = lanes[j] + lanes[j + 8];
    for (int j = 0; j < 4; ++j) s[j] += s[j + 4];
    for (int j = 0; j < 2; ++j) s[j] += s[j + 2];
    return s[0] + s[1];
}

// M dot products of M rows of `a` (stride `a_stride`) with one row `b`: the loads of b are shared.
template <int M>
inline __attribute__((always_inline)) void dot_rows(const float* a, int64_t a_stride, const float* b,
                                                    int64_t count, float* out, int64_t out_stride) {
    float acc[M][kLanes] = {};
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes)
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < kLanes; ++j) acc[m][j] += a[m * a_stride + k + j] * b[k + j];
    for (int j = 0; k + j < count; ++j)
        for (int m = 0; m < M; ++m) acc[m][j] += a[m * a_stride + k + j] * b[k + j];
    for (int m = 0; m < M; ++m) out[m * out_stride] = fold(acc[m]);
}

}  // namespace thermocline
