// The gated delta rule: a causal convolution over channels, then for each value head a state [key_dim, value_dim]
// that every token decays, corrects and reads. Token by token in the order of positions, so that a token's
// numbers depend on nothing but the tokens before it: not on how a prompt is cut.
#pragma once

#include "pointwise.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

inline Vec silu(Vec x) { return div(x, add(broadcast(1.0f), exp(sub(zero(), x)))); }

// Scales a head to the length `factor`. Squares are added in double.
inline void unit_row(float* x, int64_t width, float factor) {
    constexpr double kEpsilon = 1e-6;
    Doubles squares = zero_doubles();
    each_vector(width, [&](int64_t i, int64_t n) { squares = add_squares(squares, load_lanes(x + i, n)); });
    const double length = __builtin_sqrt(reduce_add(squares) + kEpsilon);
    const Vec scale = broadcast(static_cast<float>(static_cast<double>(factor) / length));
    each_vector(width, [&](int64_t i, int64_t n) { store_lanes(x + i, mul(load_lanes(x + i, n), scale), n); });
}

// The channels of a run's token `back` before its token t: from the run, or from the state before it.
inline const float* channels_before(const DeltaJob& job, const DeltaRun& run, int64_t t, int64_t back) {
    const int64_t channels = job.shape.channels(), kept = job.shape.conv_width - 1;
    if (t >= back) return job.mixed + (run.first + t - back) * channels;
    return job.conv_states + (run.slot * kept + kept + t - back) * channels;
}

// Convolved channels with unit queries and keys to `convolved`, the decays and rates to `gates`.
void delta_tokens(const DeltaJob& job, const DeltaRun& run, int64_t first_token, int64_t last_token) {
    const DeltaShape& s = job.shape;
    const int64_t channels = s.channels(), width = s.conv_width;
    const float query_length = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(s.key_dim)));
    for (int64_t t = first_token; t < last_token; ++t) {
        const int64_t row = run.first + t;
        float* out = job.convolved + row * channels;
        each_vector(channels, [&](int64_t i, int64_t n) {
            Vec sum = zero();
            for (int64_t j = 0; j < width; ++j) {
                const float* x = channels_before(job, run, t, width - 1 - j);
                sum = fma(load_lanes(job.conv + j * channels + i, n), load_lanes(x + i, n), sum);
            }
            store_lanes(out + i, silu(sum), n);
        });
        for (int64_t h = 0; h < s.key_heads; ++h) {
            unit_row(out + h * s.key_dim, s.key_dim, query_length);
            unit_row(out + (s.key_heads + h) * s.key_dim, s.key_dim, 1.0f);
        }
        float* decay = job.gates + row * 2 * s.value_heads;
        float* rate = decay + s.value_heads;
        const float* alpha = job.alpha + row * s.value_heads;
        const float* beta = job.beta + row * s.value_heads;
        each_vector(s.value_heads, [&](int64_t i, int64_t n) {
            const Vec step = softplus(add(load_lanes(alpha + i, n), load_lanes(job.step_bias + i, n)));
            store_lanes(decay + i, exp(mul(step, load_lanes(job.decay + i, n))), n);
            store_lanes(rate + i, sigmoid(load_lanes(beta + i, n)), n);
        });
    }
}

// One token's step of `N` vectors of columns of a head's state, whose rows lie `stride` apart.
template <int N>
inline void delta_step(float* state, int64_t stride, const float* q, const float* k, const float* v, float decay,
                       float rate, int64_t key_dim, int64_t last_lanes, float* out) {
    const auto lanes = [&](int j) { return j == N - 1 ? last_lanes : int64_t{kWidth}; };
    Vec found[N], read[N], change[N];
    for (int j = 0; j < N; ++j) found[j] = read[j] = zero();
    for (int64_t i = 0; i < key_dim; ++i) {
        const Vec key = broadcast(k[i]);
        for (int j = 0; j < N; ++j)
            found[j] = fma(key, load_lanes(state + i * stride + j * kWidth, lanes(j)), found[j]);
    }
    const Vec kept = broadcast(decay), amount = broadcast(rate);
    for (int j = 0; j < N; ++j)
        change[j] = mul(amount, fnma(kept, found[j], load_lanes(v + j * kWidth, lanes(j))));
    for (int64_t i = 0; i < key_dim; ++i) {
        const Vec key = broadcast(k[i]), query = broadcast(q[i]);
        for (int j = 0; j < N; ++j) {
            float* at = state + i * stride + j * kWidth;
            const Vec next = fma(key, change[j], mul(kept, load_lanes(at, lanes(j))));
            store_lanes(at, next, lanes(j));
            read[j] = fma(query, next, read[j]);
        }
    }
    for (int j = 0; j < N; ++j) store_lanes(out + j * kWidth, read[j], lanes(j));
}

// Columns [first, first + columns) of a head's state, at most kDeltaColumns, through all tokens of a run.
// scratch: key_dim * kDeltaColumns floats.
void delta_columns(const DeltaJob& job, const DeltaRun& run, int64_t head, int64_t first, int64_t columns,
                   float* scratch) {
    const DeltaShape& s = job.shape;
    const int64_t channels = s.channels(), key_head = s.key_head_of(head);
    float* state = job.states + (run.slot * s.value_heads + head) * s.key_dim * s.value_dim + first;
    int64_t stride = s.value_dim;
    float* at = state;
    // Rows far apart share few places of the first cache: for more than one token it pays to gather them.
    const bool gathers = run.length > 1;
    const size_t row_bytes = static_cast<size_t>(columns) * sizeof(float);
    if (gathers) {
        at = scratch;
        stride = kDeltaColumns;
        for (int64_t i = 0; i < s.key_dim; ++i)
            __builtin_memcpy(at + i * stride, state + i * s.value_dim, row_bytes);
    }
    const int64_t vectors = (columns + kWidth - 1) / kWidth, last = columns - (vectors - 1) * kWidth;
    for (int64_t t = run.first; t < run.first + run.length; ++t) {
        const float* q = job.convolved + t * channels + key_head * s.key_dim;
        const float* k = q + s.key_heads * s.key_dim;
        const float* v = job.convolved + t * channels + 2 * s.key_heads * s.key_dim + head * s.value_dim + first;
        const float decay = job.gates[t * 2 * s.value_heads + head];
        const float rate = job.gates[t * 2 * s.value_heads + s.value_heads + head];
        float* out = job.out + (t * s.value_heads + head) * s.value_dim + first;
        switch (vectors) {
            case 1: delta_step<1>(at, stride, q, k, v, decay, rate, s.key_dim, last, out); break;
            case 2: delta_step<2>(at, stride, q, k, v, decay, rate, s.key_dim, last, out); break;
            case 3: delta_step<3>(at, stride, q, k, v, decay, rate, s.key_dim, last, out); break;
            default: delta_step<4>(at, stride, q, k, v, decay, rate, s.key_dim, last, out); break;
        }
    }
    if (gathers)
        for (int64_t i = 0; i < s.key_dim; ++i)
            __builtin_memcpy(state + i * s.value_dim, at + i * stride, row_bytes);
}

// out = rms_norm(out) * gain * silu(z), head by head.
void delta_output(const DeltaJob& job, int64_t first_row, int64_t last_row) {
    const int64_t width = job.shape.value_dim;
    for (int64_t r = first_row; r < last_row; ++r) {
        float* out = job.out + r * width;
        norm_row(out, job.gain, job.epsilon, width, out);
        silu_multiply(job.z + r * width, out, width, out);
    }
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
