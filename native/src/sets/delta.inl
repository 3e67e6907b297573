// The gated delta rule: a causal convolution over channels, then for each value head a state [key_dim, value_dim]
// that every token decays (as a whole, or each row by itself), corrects and reads. Token by token in the order of
// positions, so that a token's numbers depend on nothing but the tokens before it: not on how a prompt is cut.
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
inline const float* channels_before(const DeltaJob& job, const StateRun& run, int64_t t, int64_t back) {
    const int64_t channels = job.shape.channels(), kept = job.shape.conv_width - 1;
    if (t >= back) return job.mixed + (run.first + t - back) * channels;
    return job.conv_states + (run.slot * kept + kept + t - back) * channels;
}

// Convolved channels with unit queries and keys to `convolved`, the decays and rates to `gates`.
void delta_tokens(const DeltaJob& job, const StateRun& run, int64_t first_token, int64_t last_token) {
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
        float* decay = job.gates + row * s.gates();
        float* rate = decay + s.steps();
        const float* alpha = job.alpha + row * s.steps();
        const float* beta = job.beta + row * s.value_heads;
        const auto decay_of = [&](int64_t i, int64_t n, Vec speed) {
            const Vec step = add(load_lanes(alpha + i, n), load_lanes(job.step_bias + i, n));
            if (job.lower_bound < 0.0f) return exp(mul(sigmoid(mul(step, speed)), broadcast(job.lower_bound)));
            return exp(mul(softplus(step), speed));
        };
        if (s.by_channel) {
            for (int64_t h = 0; h < s.value_heads; ++h) {
                const int64_t first = h * s.key_dim;
                const Vec speed = broadcast(job.decay[h]);
                each_vector(s.key_dim, [&](int64_t i, int64_t n) {
                    store_lanes(decay + first + i, decay_of(first + i, n, speed), n);
                });
            }
        } else {
            each_vector(s.value_heads, [&](int64_t i, int64_t n) {
                store_lanes(decay + i, decay_of(i, n, load_lanes(job.decay + i, n)), n);
            });
        }
        each_vector(s.value_heads, [&](int64_t i, int64_t n) {
            store_lanes(rate + i, sigmoid(load_lanes(beta + i, n)), n);
        });
    }
}

// `N` vectors of columns of a head's state, whose rows lie `stride` apart, through all tokens of a run. What the
// state holds under a token's key is added up while the token before it is written: one pass for each token, and
// the same sums as in two. The last vector has `lanes` columns; with `Whole` rows there is room for all of it.
// `ByChannel`: a row's decay meets its number of the key, as the rows of a sum decay differently.
template <int N, bool Whole, bool ByChannel>
inline void delta_steps(const DeltaJob& job, const StateRun& run, int64_t head, int64_t first, int64_t lanes,
                        float* state, int64_t stride) {
    const DeltaShape& s = job.shape;
    const int64_t channels = s.channels(), keys = s.key_heads * s.key_dim, end = run.first + run.length;
    const auto width = [&](int j) { return j == N - 1 ? lanes : int64_t{kWidth}; };
    const auto row_width = [&](int j) { return Whole || j < N - 1 ? int64_t{kWidth} : lanes; };
    const auto query = [&](int64_t t) { return job.convolved + t * channels + s.key_head_of(head) * s.key_dim; };
    const auto gates = [&](int64_t t) { return job.gates + t * s.gates(); };
    const auto decays = [&](int64_t t) { return gates(t) + (ByChannel ? head * s.key_dim : head); };
    const auto decayed = [](float key, float decay) {
        return ByChannel ? mul(broadcast(key), broadcast(decay)) : broadcast(key);
    };
    Vec found[N], read[N], change[N];
    for (int j = 0; j < N; ++j) found[j] = zero();
    const float* k = query(run.first) + keys;
    const float* decay = decays(run.first);
    for (int64_t i = 0; i < s.key_dim; ++i) {
        const Vec key = decayed(k[i], decay[ByChannel ? i : 0]);
        for (int j = 0; j < N; ++j)
            found[j] = fma(key, load_lanes(state + i * stride + j * kWidth, row_width(j)), found[j]);
    }
    for (int64_t t = run.first; t < end; ++t) {
        const float* q = query(t);
        const float* v = job.convolved + t * channels + 2 * keys + head * s.value_dim + first;
        const int64_t following = t + 1 < end ? t + 1 : t;
        const float* next_key = query(following) + keys;
        const float* next_decay = decays(following);
        const Vec whole = broadcast(decay[0]), rate = broadcast(gates(t)[s.steps() + head]);
        for (int j = 0; j < N; ++j) {
            const Vec value = load_lanes(v + j * kWidth, width(j));
            change[j] = mul(rate, ByChannel ? sub(value, found[j]) : fnma(whole, found[j], value));
            found[j] = read[j] = zero();
        }
        for (int64_t i = 0; i < s.key_dim; ++i) {
            const Vec key = broadcast(k[i]), asked = broadcast(q[i]);
            const Vec next = decayed(next_key[i], next_decay[ByChannel ? i : 0]);
            const Vec kept = ByChannel ? broadcast(decay[i]) : whole;
            for (int j = 0; j < N; ++j) {
                float* at = state + i * stride + j * kWidth;
                const Vec now = fma(key, change[j], mul(kept, load_lanes(at, row_width(j))));
                store_lanes(at, now, row_width(j));
                read[j] = fma(asked, now, read[j]);
                found[j] = fma(next, now, found[j]);
            }
        }
        float* out = job.out + (t * s.value_heads + head) * s.value_dim + first;
        for (int j = 0; j < N; ++j) store_lanes(out + j * kWidth, read[j], width(j));
        k = next_key;
        decay = next_decay;
    }
}

template <bool Whole, bool ByChannel>
inline void delta_vectors(const DeltaJob& job, const StateRun& run, int64_t head, int64_t first, int64_t columns,
                        float* state, int64_t stride) {
    const int64_t vectors = (columns + kWidth - 1) / kWidth, lanes = columns - (vectors - 1) * kWidth;
    switch (vectors) {
        case 1: return delta_steps<1, Whole, ByChannel>(job, run, head, first, lanes, state, stride);
        case 2: return delta_steps<2, Whole, ByChannel>(job, run, head, first, lanes, state, stride);
        case 3: return delta_steps<3, Whole, ByChannel>(job, run, head, first, lanes, state, stride);
        default: return delta_steps<4, Whole, ByChannel>(job, run, head, first, lanes, state, stride);
    }
}

template <bool Whole>
inline void delta_block(const DeltaJob& job, const StateRun& run, int64_t head, int64_t first, int64_t columns,
                        float* state, int64_t stride) {
    if (job.shape.by_channel) return delta_vectors<Whole, true>(job, run, head, first, columns, state, stride);
    return delta_vectors<Whole, false>(job, run, head, first, columns, state, stride);
}

// Columns [first, first + columns) of a head's state, at most kDeltaColumns, through all tokens of a run.
// scratch: key_dim * kDeltaColumns floats.
void delta_columns(const DeltaJob& job, const StateRun& run, int64_t head, int64_t first, int64_t columns,
                   float* scratch) {
    const DeltaShape& s = job.shape;
    float* state = job.states + (run.slot * s.value_heads + head) * s.key_dim * s.value_dim + first;
    if (run.length == 1) {
        if (columns % kWidth == 0) return delta_block<true>(job, run, head, first, columns, state, s.value_dim);
        return delta_block<false>(job, run, head, first, columns, state, s.value_dim);
    }
    // Rows far apart share few places of the first cache: for more than one token it pays to gather them.
    const size_t row_bytes = static_cast<size_t>(columns) * sizeof(float);
    for (int64_t i = 0; i < s.key_dim; ++i) {
        float* row = scratch + i * kDeltaColumns;
        __builtin_memcpy(row, state + i * s.value_dim, row_bytes);
        for (int64_t c = columns; c < kDeltaColumns; ++c) row[c] = 0.0f;
    }
    delta_block<true>(job, run, head, first, columns, scratch, kDeltaColumns);
    for (int64_t i = 0; i < s.key_dim; ++i)
        __builtin_memcpy(state + i * s.value_dim, scratch + i * kDeltaColumns, row_bytes);
}

// out = rms_norm(out) * gain * silu(z), or sigmoid(z), head by head.
void delta_output(const DeltaJob& job, int64_t first_row, int64_t last_row) {
    const int64_t width = job.shape.value_dim;
    for (int64_t r = first_row; r < last_row; ++r) {
        float* out = job.out + r * width;
        norm_row(out, job.gain, job.epsilon, width, out);
        const float* z = job.z + r * width;
        if (!job.sigmoid_gate) {
            silu_multiply(z, out, width, out);
            continue;
        }
        each_vector(width, [&](int64_t i, int64_t n) {
            store_lanes(out + i, mul(load_lanes(out + i, n), sigmoid(load_lanes(z + i, n))), n);
        });
    }
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
