// What an expert computes between its products, sixteen numbers at a time; see ExpertActivation.
#pragma once

#include "simd.h"
#include "thermocline/dense_kernels.h"

namespace thermocline::THERMOCLINE_SET {
namespace {

inline Vec silu_times(Vec gate, Vec up) {
    return mul(div(gate, add(broadcast(1.0f), exp(sub(zero(), gate)))), up);
}

inline Vec clamped_silu_times(Vec gate, Vec up) {
    // NaN is the second operand, and stays.
    const Vec x = min(broadcast(7.0f), gate);
    const Vec y = min(broadcast(7.0f), max(broadcast(-7.0f), up));
    const Vec decay = exp(mul(x, broadcast(-1.702f)));
    return mul(div(x, add(broadcast(1.0f), decay)), add(y, broadcast(1.0f)));
}

// x / 2 * (1 + tanh(y)) = x / (1 + e^-2y) with y = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Vec gelu_times(Vec gate, Vec up) {
    const Vec cubed = mul(mul(gate, gate), gate);
    const Vec y = fma(broadcast(0.044715f), cubed, gate);
    const Vec decay = exp(mul(y, broadcast(-1.59576912f)));
    return mul(div(gate, add(broadcast(1.0f), decay)), up);
}

// NaN is the second operand, and stays.
inline Vec limited_silu_times(Vec gate, Vec up, SiluLimits limits) {
    const Vec x = min(broadcast(limits.gate), silu_times(gate, broadcast(1.0f)));
    return mul(x, min(broadcast(limits.up), max(broadcast(-limits.up), up)));
}

inline Vec relu_times(Vec gate, Vec up) { return mul(max(zero(), gate), up); }

inline Vec relu_square(Vec up) {
    const Vec x = max(zero(), up);
    return mul(x, x);
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
