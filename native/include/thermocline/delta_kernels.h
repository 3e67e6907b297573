// What one instruction set offers for the gated delta rule: plain structs. delta.h is the interface for callers.
#pragma once

#include <cstdint>

#include "thermocline/state_runs.h"

namespace thermocline {

// Channels of a token lie as queries, keys, values, head by head.
struct DeltaShape {
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t conv_width;  // tokens that the convolution sees, at least 2
    bool tiled;          // value head h goes with key head h % key_heads; else neighbours share one
    bool by_channel;     // each row of a state decays by itself, not the whole of it alike

    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int64_t steps() const { return by_channel ? value_heads * key_dim : value_heads; }
    int64_t gates() const { return steps() + value_heads; }
    StateSizes state() const { return {conv_width - 1, channels(), value_heads, key_dim, value_dim}; }
    int64_t key_head_of(int64_t head) const { return tiled ? head % key_heads : head / (value_heads / key_heads); }
};

struct DeltaJob {
    DeltaShape shape;
    const float* mixed;      // [tokens, channels], before the convolution
    const float* z;          // [tokens, value_heads, value_dim]
    const float* alpha;      // [tokens, steps]
    const float* beta;       // [tokens, value_heads]
    const float* conv;       // [conv_width, channels], the oldest token's first
    const float* step_bias;  // [steps]
    const float* decay;      // [value_heads], negative: how fast a step forgets; positive with a lower bound
    const float* gain;       // [value_dim]
    float epsilon;
    bool sigmoid_gate;  // z's sigmoid multiplies what is read; else its SiLU
    float lower_bound;  // negative: of the logarithm of a decay, of which a sigmoid gives a part; 0: a softplus gives it
    const StateRun* runs;
    int64_t num_runs;
    float* conv_states;  // [slots, conv_width - 1, channels]: the last tokens' channels, before the convolution
    float* states;       // [slots, value_heads, key_dim, value_dim]
    float* out;          // [tokens, value_heads, value_dim]
    float* convolved = nullptr;  // [tokens, channels] of scratch
    float* gates = nullptr;      // [tokens, gates] of scratch: decays [steps], then rates [value_heads]
};

// Columns of a state that one item takes through a run: 32 KiB of it for keys of 128 numbers.
constexpr int64_t kDeltaColumns = 64;

}  // namespace thermocline
