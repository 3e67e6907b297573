// The first Mamba: a causal convolution over columns, then a state of state_dim numbers per column that every token
// decays, each number by itself, adds to and reads. Token by token in the order of positions, so that a token's numbers
// depend on nothing but the tokens before it: not on how a prompt is cut.
#pragma once

#include "recurrent.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

// silu(convolution(x) + bias) to `out`.
void selective_tokens(const SelectiveJob& job, const StateRun& run, int64_t first_token, int64_t last_token) {
    const SelectiveShape& s = job.shape;
    const int64_t kept = s.conv_width - 1;
    for (int64_t t = first_token; t < last_token; ++t) {
        const int64_t row = run.first + t;
        each_vector(s.width, [&](int64_t i, int64_t n) {
            Vec sum = load_lanes(job.conv_bias + i, n);
            for (int64_t j = 0; j < s.conv_width; ++j) {
                const int64_t back = kept - j;
                const float* x = t >= back ? job.rows + (row - back) * s.row()
                                           : job.conv_states + (run.slot * kept + kept + t - back) * s.width;
                sum = fma(load_lanes(job.conv + j * s.width + i, n), load_lanes(x + i, n), sum);
            }
            store_lanes(job.out + row * s.width + i, silu(sum), n);
        });
    }
}

// `N` vectors of columns through all tokens of a run. Rows of the state and of the decays lie `stride` apart. The last
// vector has `lanes` columns; with `Whole` rows there is room for all of it.
template <int N, bool Whole>
inline void selective_steps(const SelectiveJob& job, const StateRun& run, int64_t first, int64_t lanes, float* state,
                            const float* decay, int64_t stride) {
    const SelectiveShape& s = job.shape;
    const auto width = [&](int j) { return j == N - 1 ? lanes : int64_t{kWidth}; };
    const auto row_width = [&](int j) { return Whole || j < N - 1 ? int64_t{kWidth} : lanes; };
    for (int64_t t = run.first; t < run.first + run.length; ++t) {
        const int64_t at = t * s.width + first;
        const float* keys = job.keys + t * s.state_dim;
        const float* queries = job.queries + t * s.state_dim;
        Vec step[N], change[N], read[N];
        for (int j = 0; j < N; ++j) {
            const int64_t i = j * kWidth;
            const Vec given = load_lanes(job.steps + at + i, width(j));
            step[j] = softplus(add(given, load_lanes(job.step_bias + first + i, width(j))));
            change[j] = mul(step[j], load_lanes(job.convolved + at + i, width(j)));
            read[j] = zero();
        }
        for (int64_t r = 0; r < s.state_dim; ++r) {
            const Vec key = broadcast(keys[r]), asked = broadcast(queries[r]);
            for (int j = 0; j < N; ++j) {
                const int64_t i = r * stride + j * kWidth;
                const Vec kept = exp(mul(step[j], load_lanes(decay + i, row_width(j))));
                const Vec now = fma(key, change[j], mul(kept, load_lanes(state + i, row_width(j))));
                store_lanes(state + i, now, row_width(j));
                read[j] = fma(asked, now, read[j]);
            }
        }
        const float* gates = job.rows + t * s.row() + s.width + first;
        for (int j = 0; j < N; ++j) {
            const int64_t i = j * kWidth;
            const Vec x = load_lanes(job.convolved + at + i, width(j)), z = load_lanes(gates + i, width(j));
            const Vec out = fma(load_lanes(job.skip + first + i, width(j)), x, read[j]);
            store_lanes(job.out + at + i, silu_times(z, out), width(j));
        }
    }
}

template <bool Whole>
inline void selective_block(const SelectiveJob& job, const StateRun& run, int64_t first, int64_t columns, float* state,
                            const float* decay, int64_t stride) {
    const int64_t vectors = (columns + kWidth - 1) / kWidth, lanes = columns - (vectors - 1) * kWidth;
    switch (vectors) {
        case 1: return selective_steps<1, Whole>(job, run, first, lanes, state, decay, stride);
        case 2: return selective_steps<2, Whole>(job, run, first, lanes, state, decay, stride);
        case 3: return selective_steps<3, Whole>(job, run, first, lanes, state, decay, stride);
        default: return selective_steps<4, Whole>(job, run, first, lanes, state, decay, stride);
    }
}

// Columns [first, first + columns) of a state, at most kMambaColumns, through all tokens of a run.
// scratch: 2 * state_dim * kMambaColumns floats.
void selective_columns(const SelectiveJob& job, const StateRun& run, int64_t first, int64_t columns, float* scratch) {
    const SelectiveShape& s = job.shape;
    float* state = job.states + run.slot * s.state_dim * s.width + first;
    const float* decay = job.decay + first;
    if (run.length == 1) {
        if (columns % kWidth == 0) return selective_block<true>(job, run, first, columns, state, decay, s.width);
        return selective_block<false>(job, run, first, columns, state, decay, s.width);
    }
    // Rows far apart share few places of the first cache: for more than one token it pays to gather them.
    float* decays = scratch + s.state_dim * kMambaColumns;
    const size_t row_bytes = static_cast<size_t>(columns) * sizeof(float);
    for (int64_t r = 0; r < s.state_dim; ++r) {
        __builtin_memcpy(scratch + r * kMambaColumns, state + r * s.width, row_bytes);
        __builtin_memcpy(decays + r * kMambaColumns, decay + r * s.width, row_bytes);
        for (int64_t c = columns; c < kMambaColumns; ++c)
            scratch[r * kMambaColumns + c] = decays[r * kMambaColumns + c] = 0.0f;
    }
    selective_block<true>(job, run, first, columns, scratch, decays, kMambaColumns);
    for (int64_t r = 0; r < s.state_dim; ++r)
        __builtin_memcpy(state + r * s.width, scratch + r * kMambaColumns, row_bytes);
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
