// Matrix products with weights as they lie in the file.
#pragma once

#include <cstdint>

#include "thermocline/compute.h"
#include "thermocline/dense_kernels.h"
#include "thermocline/formats.h"

namespace thermocline {

// The arithmetic of a product. They differ only in sets that have tiles: there Prompt takes weights and
// activations in bfloat16 (F32 and F16 weights stay in float32), Decode takes integer dot products. Within a
// form a token's result depends on nothing but the token, the weights and the instruction set.
enum class Form { Decode, Prompt };

inline bool on_tiles(const Compute& compute, Form form) { return form == Form::Prompt && compute.set.tiles != nullptr; }

// out[t * out_stride + n] = w.scale * sum_k x[t, k] * w[n, k] (+ add[t * out_stride + n])
struct Product {
    Weight weight;
    float* out;
    int64_t out_stride;
    const float* add = nullptr;
};

// Several products of one x [tokens, cols]; x is quantised once per form that their types need.
void multiply_all(const Compute& compute, const float* x, int64_t tokens, const Product* products, int count);
void multiply_all(const Compute& compute, Form form, const float* x, int64_t tokens, const Product* products,
                  int count);

// out[t, h] = weights[h] times x[t, h]: x is [tokens, heads, cols] and out [tokens, heads, rows], whose rows lie `stride`
// numbers apart. Prompts have no arithmetic of their own here.
void multiply_heads(const Compute& compute, const StackedWeight& weights, int64_t heads, const float* x, int64_t tokens,
                    float* out, int64_t stride);

struct ExpertWeights {
    Weight gate;  // [intermediate, hidden]; nothing where the activation has no gate
    Weight up;    // [intermediate, hidden]
    Weight down;  // [hidden, intermediate]
    ExpertActivation activation = ExpertActivation::Silu;
    // A number per row, added to the product; or null. The routing weight multiplies the sum.
    const float* gate_bias = nullptr;
    const float* up_bias = nullptr;
    const float* down_bias = nullptr;
    SiluLimits limits{};
};

// The pairs (token, slot) that chose one expert. All experts of a work have one activation with its limits, and biases or
// none.
struct ExpertGroup {
    ExpertWeights weights;
    int64_t first;  // of the pairs, which are sorted by expert
    int64_t count;
    bool may_be_missing = false;  // of its weights: from memory
};

struct ExpertWork {
    const ExpertGroup* groups;
    int64_t num_groups;
    const float* x;          // [tokens, hidden]
    int64_t tokens;
    int64_t hidden;
    const int32_t* rows;     // [pairs], the token of a pair
    const float* scale;      // [pairs], its routing weight
    int64_t pairs;
};

// out[pair] = scale * down(activation(gate(x[row]), up(x[row]))), float32 [pairs, hidden].
void expert_outputs(const Compute& compute, const ExpertWork& work, float* out);
void expert_outputs(const Compute& compute, Form form, const ExpertWork& work, float* out);

// out[t] = residual[t] + ((slot 0 + slot 1) + ...), float32 [tokens, hidden]; pair_of [tokens, slots] says
// which pair each slot is. Equal to the bit to adding up expert_outputs in that order.
void expert_sum(const Compute& compute, const ExpertWork& work, const int32_t* pair_of, int64_t slots,
                const float* residual, float* out);
void expert_sum(const Compute& compute, Form form, const ExpertWork& work, const int32_t* pair_of, int64_t slots,
                const float* residual, float* out);

}  // namespace thermocline
