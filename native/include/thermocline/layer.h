// A layer of a mixture-of-experts model as one job: attention, routing and all chosen experts, made of the parts
// in dense.h and matmul.h, with their results to the bit. For few tokens, where a call from Python for each part
// would cost as much as some parts.
#pragma once

#include <cstdint>
#include <functional>

#include "thermocline/compute.h"
#include "thermocline/delta.h"
#include "thermocline/dense.h"
#include "thermocline/latent.h"
#include "thermocline/matmul.h"
#include "thermocline/recurrent.h"

namespace thermocline {

// What attention's output is multiplied by. Its numbers are a weight's, or lie in q: each head's rows of q are
// followed by as many of its gate.
struct OutputGate {
    enum class From { Nowhere, Weight, Queries } from;
    Activation activation;
    Weight weight;  // [heads, or heads * value_dim, hidden]
};

struct AttentionPart {
    const float* norm;  // [hidden]
    Weight q, k, v;     // rows: heads * head_dim (twice that with gates), kv_heads * head_dim, kv_heads * value_dim; k and v
                        // without data: an earlier layer stored them
    Weight output;      // [hidden, heads * value_dim]
    const float* q_gain;  // [head_dim], or null: no norm
    const float* k_gain;
    const float* wide_q_gain;  // [heads * head_dim], or null: no norm over all heads
    const float* wide_k_gain;
    const float* q_bias;  // a number per row, or null
    const float* k_bias;
    const float* v_bias;
    float epsilon, scale;
    int64_t window;  // 0: none; see AttentionJob
    OutputGate gate;
    const float* sinks;        // [heads], see AttentionJob; or null
    const float* output_bias;  // [hidden], or null
    bool norm_last = false;  // of heads: after the rotary embedding
    const float* v_gain = nullptr;  // [value_dim], or null: no norm
    PostNorm post = {};  // of the output, before it is added
    bool chunked = false;  // see AttentionJob
    Temperature temperature = {0.0f, 1, 0};
    Centering centering = {};  // of the norm of the input
    float clip = 0.0f;  // what q, k and v are limited to in size, behind their biases; 0: nothing
};

struct DeltaPart {
    static constexpr int kMaxMixed = 3;

    const float* norm;        // [hidden]
    Weight mixed[kMaxMixed];  // of `num_mixed` the rows one after another: [channels, hidden]
    int num_mixed;
    Weight z, alpha;          // [value_heads * value_dim, hidden or rank], [steps, hidden or rank]
    Weight z_low, alpha_low;  // [rank, hidden], products before them; without data: none
    Weight beta;              // [value_heads, hidden]
    Weight output;            // [hidden, value_heads * value_dim]
    DeltaJob rule;            // but for its inputs, output, runs and states
};

// Products of what the first Mamba's convolution gives, [rank, width] and [state_dim, width], each with a norm behind
// it, and the steps' second one, [width, rank].
struct SelectiveProducts {
    Weight low, keys, queries, steps;
    const float* low_gain;    // [rank]
    const float* key_gain;    // [state_dim]
    const float* query_gain;
};

// A mixer whose input and output are one product each: a short convolution, Mamba2, or the first Mamba.
struct RecurrentPart {
    enum class Kind { Nothing, ShortConv, Mamba, Selective } kind;
    const float* norm;  // [hidden]
    float epsilon;
    Weight input;    // [numbers of a token's row, hidden]
    Weight output;   // [hidden, numbers that the rule gives]
    StateSizes state;
    ShortConvJob conv;  // or
    MambaJob mamba;     // or
    SelectiveJob selective;  // but for inputs, output, runs and states
    SelectiveProducts products;  // of the last
};

struct RouterPart {
    Weight matrix;  // [experts, hidden]
    RouteRule rule;
    const float* norm = nullptr;  // [hidden], of the router's own input; null: it takes what the shared expert takes
    const float* experts_norm = nullptr;  // [hidden], of the experts' own input
    bool weighs_input = false;  // a token's one weight multiplies what its expert takes, and becomes 1
};

// Products around experts of another width than the layer's: down [width, hidden] and up [hidden, width].
struct AroundExperts {
    bool exist = false;
    Weight down, up;
};

// A number per row of the same matrix of all experts.
struct StackedBias {
    const float* first = nullptr;
    int64_t stride = 0;  // numbers from one expert's to the next

    const float* operator[](int64_t expert) const { return first ? first + expert * stride : nullptr; }
};

// The experts of a layer, or of slots that hold experts.
struct StackedExperts {
    StackedWeight gate, up, down;
    ExpertActivation activation = ExpertActivation::Silu;
    StackedBias gate_bias, up_bias, down_bias;
    SiluLimits limits{};

    ExpertWeights operator[](int64_t expert) const {
        return {thermocline::has_gate(activation) ? gate[expert] : Weight{},
                up[expert],
                down[expert],
                activation,
                gate_bias[expert],
                up_bias[expert],
                down_bias[expert],
                limits};
    }
};

// What a layer adds at its end of each token's embedding e of its own: x + norm(up * (gelu(gate * x) * e)).
struct EmbeddingPart {
    bool exists = false;
    Weight gate, up;  // [width, hidden], [hidden, width]
    PostNorm norm;    // of one part
};

// An expert that every token takes, weighed by the sigmoid of one number where there is a gate.
struct SharedPart {
    bool exists, has_gate;
    ExpertWeights expert;
    Weight gate;  // [1, hidden]
};

// What attention leaves beside the residual stream, where the experts' input goes.
enum class HandedOn : int {
    Nothing = 0,
    Normed = 1,  // what attention took, for experts that take the same
    Input = 2,   // the layer's input, for a router that takes it as it is
};

struct Layer {
    int64_t hidden;
    AttentionPart attention;  // or
    DeltaPart delta;  // or
    RecurrentPart recurrent;  // or
    bool is_latent;
    LatentPart latent;  // or nothing
    const float* norm;  // [hidden], before the experts; null without a feed-forward
    float epsilon;
    Centering centering = {};  // of that norm
    HandedOn handed_on = HandedOn::Nothing;
    bool is_routed;
    RouterPart router;
    StackedExperts experts;
    AroundExperts around;
    SharedPart shared;
    PostNorm end = {};  // of the feed-forward, of what the shared expert and the routed ones give
    EmbeddingPart embedding = {};
};

// Where the tokens of a chunk stand, and where their keys and values go.
struct LayerTokens {
    int64_t count;
    const int32_t* positions;  // [count]
    const int32_t* slots;      // [count]
    const float* cosines;      // [count, rotary_dims / 2]
    const float* sines;
    int64_t rotary_dims;
    RopeLayout rope;
    const int32_t* starts;        // [sequences + 1], of their rows
    const int32_t* block_tables;  // one after another
    const int32_t* table_starts;  // [sequences + 1]
    int64_t sequences;
    const int32_t* expanded = nullptr;  // [sequences], how many first tokens take latent attention's expanded form; null: none
    const float* embedded = nullptr;  // [count, width of the layer's embeddings], where it has some
};

struct LayerCacheView {
    CacheShape shape;
    uint8_t* keys;
    uint8_t* values;
};

// The same for a layer with recurrent state: consecutive tokens of some sequences, and all slots' states.
struct StateTokens {
    int64_t count;
    const StateRun* runs;  // of one slot in order, where a run ends at a copy of the state
    const int64_t* copies;  // [num_runs], the slot that gets a copy after the run, or -1
    int64_t num_runs;
    float* conv_states;
    float* states;
};

// What jobs are marked with on the pool's timeline.
enum class LayerMark : int64_t { Attend = 0, Route = 1, Experts = 2 };

// Called between a layer's routing and its experts, when ids and weights are there, with the residual stream [tokens,
// hidden] to which the experts are added. Whoever asks for it reads the experts of a file: some may be missing.
using OnRouted = std::function<void(const float* stream)>;

// x, out: [tokens, hidden]; ids, weights: [tokens, chosen], as `route` gives them; nothing in a layer that is not routed.
void run_layer(const Compute& compute, const Dense& dense, Form form, const Layer& layer, const LayerTokens& tokens,
               const LayerCacheView& cache, const float* x, float* out, int32_t* ids, float* weights,
               const OnRouted& on_routed);
void run_layer(const Compute& compute, const Dense& dense, Form form, const Layer& layer, const StateTokens& tokens,
               const float* x, float* out, int32_t* ids, float* weights, const OnRouted& on_routed);
// The same for a layer without a mixer.
void run_layer(const Compute& compute, const Dense& dense, Form form, const Layer& layer, int64_t tokens,
               const float* x, float* out, int32_t* ids, float* weights, const OnRouted& on_routed);

// The parts of a layer. Attention, or the gated delta rule: x plus its output, [tokens, hidden].
void attend(const Compute& compute, const Dense& dense, Form form, const AttentionPart& part,
            const LayerTokens& tokens, const LayerCacheView& cache, const float* x, float* out,
            float* normed = nullptr);  // [tokens, hidden], which gets the normed input
void attend(const Compute& compute, const Dense& dense, Form form, const Layer& layer, const LayerTokens& tokens,
            const LayerCacheView& cache, const float* x, float* out,
            float* handed);  // [tokens, hidden], which gets what the layer's attention hands on
void attend(const Compute& compute, const Dense& dense, Form form, const LatentPart& part, const LayerTokens& tokens,
            const LayerCacheView& cache, const float* x, float* out);
void apply_delta(const Compute& compute, const Dense& dense, Form form, const DeltaPart& part,
                 const StateTokens& tokens, const float* x, float* out);
void apply_recurrent(const Compute& compute, const Dense& dense, Form form, const RecurrentPart& part,
                     const StateTokens& tokens, const float* x, float* out);
// Adds the shared expert to the residual stream [tokens, hidden]; normed gets the experts' input. Where the layer is
// routed, ids and weights get each token's choice; logits: [tokens, experts], overwritten.
//
// Where the layer ends with a norm, `kept` [2, tokens, hidden] gets the residual stream and the shared expert's output,
// and residual zeros, to which the experts are added; finish_layer then ends it. A layer that is not routed ends here.
void choose_experts(const Compute& compute, const Dense& dense, Form form, const Layer& layer, int64_t tokens,
                    float* residual, float* normed, float* logits, float* kept, int32_t* ids, float* weights);
// out = the layer's output from the experts' sums [tokens, hidden], which may be out; nothing is left to do without a norm
// at the end.
void finish_layer(const Dense& dense, const Layer& layer, int64_t tokens, const float* kept, const float* sums,
                  float* out);

}  // namespace thermocline
