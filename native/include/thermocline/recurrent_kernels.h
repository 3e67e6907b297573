// What one instruction set offers for short convolutions, Mamba2 and the first Mamba: plain structs. recurrent.h is the
// interface for callers. All take a token's numbers as one row, as one product gives it.
#pragma once

#include <cstdint>

#include "thermocline/state_runs.h"

namespace thermocline {

// out = c * convolution(b * x), channel by channel.
struct ShortConvJob {
    int64_t channels;
    int64_t width;      // tokens that the convolution sees, at least 2
    const float* rows;  // [tokens, 3, channels]: b, c, x
    const float* conv;  // [width, channels], the oldest token's first
    const StateRun* runs;
    int64_t num_runs;
    float* conv_states;  // [slots, width - 1, channels]: the last tokens' b * x
    float* out;          // [tokens, channels]

    StateSizes state() const { return {width - 1, channels, 0, 0, 0}; }
};

// Neighbouring heads share a group's B and C.
struct MambaShape {
    int64_t heads, head_dim, groups, state_dim;
    int64_t conv_width;  // tokens that the convolution sees, at least 2

    int64_t width() const { return heads * head_dim; }
    int64_t channels() const { return width() + 2 * groups * state_dim; }
    int64_t row() const { return width() + channels() + heads; }
    StateSizes state() const { return {conv_width - 1, channels(), heads, state_dim, head_dim}; }
    int64_t group_of(int64_t head) const { return head / (heads / groups); }
};

struct MambaJob {
    MambaShape shape;
    const float* rows;       // [tokens, row]: z [width], then x [width], B and C [groups, state_dim], then steps [heads]
    const float* conv;       // [conv_width, channels], the oldest token's first
    const float* conv_bias;  // [channels]
    const float* step_bias;  // [heads]
    const float* decay;      // [heads], negative: how fast a step forgets
    const float* skip;       // [heads]: what of x is added to its output
    const float* gain;       // [width]
    float epsilon;
    const StateRun* runs;
    int64_t num_runs;
    float* conv_states;  // [slots, conv_width - 1, channels]: the last tokens' channels, before the convolution
    float* states;       // [slots, heads, state_dim, head_dim]
    float* out;          // [tokens, width]
    float* convolved = nullptr;  // [tokens, channels] of scratch
    float* gates = nullptr;      // [tokens, 2, heads] of scratch: decays, then steps
};

// The first Mamba: every column decays on its own, and the products of what a convolution gives say how.
struct SelectiveShape {
    int64_t width, state_dim;
    int64_t conv_width;  // tokens that the convolution sees, at least 2

    int64_t row() const { return 2 * width; }
    StateSizes state() const { return {conv_width - 1, width, 1, state_dim, width}; }
};

struct SelectiveJob {
    SelectiveShape shape;
    const float* rows;       // [tokens, 2, width]: x, z
    const float* conv;       // [conv_width, width], the oldest token's first
    const float* conv_bias;  // [width]
    const float* step_bias;  // [width]
    const float* decay;      // [state_dim, width], negative: how fast a step forgets
    const float* skip;       // [width]: what of x is added to its output
    const StateRun* runs;
    int64_t num_runs;
    float* conv_states;    // [slots, conv_width - 1, width]: the last tokens' x, before the convolution
    float* states;         // [slots, state_dim, width]
    const float* convolved;  // [tokens, width], what the convolution gave
    const float* steps;    // [tokens, width], before their bias
    const float* keys;     // [tokens, state_dim]
    const float* queries;  // [tokens, state_dim]
    float* out;            // [tokens, width], of the convolution, or of the scan
};

// Columns of a state that one item takes through a run: 32 KiB of it for states of 128 numbers.
constexpr int64_t kMambaColumns = 64;

}  // namespace thermocline
