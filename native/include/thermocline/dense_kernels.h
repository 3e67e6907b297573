// What one instruction set offers for the parts of a layer that are not products with weights: plain
// structs and one table of functions. dense.h is the interface for callers.
//
// Every function computes a range of independent items on the calling thread, in a fixed order per
// output element, so that results do not depend on how items are shared over threads.
#pragma once

#include <cstdint>

#include "thermocline/delta_kernels.h"
#include "thermocline/formats.h"
#include "thermocline/recurrent_kernels.h"

namespace thermocline {

// ggml's type ids. Rows of a head's keys hold head_dim numbers, those of its values value_dim() numbers; Q8_0 has a half
// and 32 bytes per 32 numbers.
enum class CacheType : int { F32 = 0, F16 = 1, Q8_0 = 8, BF16 = 30 };

// One layer's cache: keys and values, each `num_blocks` blocks of [kv_heads][block_tokens rows].
//
// Values of a head lie row after row, one row per token. Keys of a head lie in groups of sixteen
// tokens (the last group of a block may be narrower), dimension by dimension: number (d, token) of a
// group of w tokens is number d * w + token. So sixteen scores are computed side by side, without a
// sum across a register. In Q8_0 each 32 dimensions of a group are w halves, then 32 * w bytes.
//
// Where `latent` is not 0, the cache has keys alone: they lie row after row, and a token's value is the
// first `latent` numbers of its key.
struct CacheShape {
    CacheType type;
    int64_t num_blocks, block_tokens, kv_heads, head_dim;
    int64_t latent = 0;
    int64_t own_value_dim = 0;  // numbers of a value, where they are not as many as those of a key

    int64_t value_dim() const { return latent > 0 ? latent : own_value_dim > 0 ? own_value_dim : head_dim; }
};

enum class RopeLayout : int {
    Halves = 0,  // dimension i turns with i + rotary_dims / 2
    Pairs = 1,   // dimension 2i turns with 2i + 1
};

// Per token: norm and rotary embedding of queries (in place) and keys; keys and values go to the cache.
struct HeadsJob {
    float* q;        // [tokens, heads, head_dim]
    const float* k;  // [tokens, kv_heads, head_dim]; null: an earlier layer stored keys and values
    const float* v;  // [tokens, kv_heads, value_dim]
    int64_t tokens, heads;
    const float* q_gain;  // [head_dim], or null: no norm
    const float* k_gain;
    float epsilon;
    const float* cosines;  // [tokens, rotary_dims / 2]
    const float* sines;
    int64_t rotary_dims;  // even, at most head_dim; the rest of a head is not turned
    RopeLayout layout;
    CacheShape cache;
    uint8_t* keys;
    uint8_t* values;
    const int32_t* slots;  // [tokens]: block * block_tokens + place in the block
    bool norm_last = false;  // the norm comes after the rotary embedding
    const float* v_gain = nullptr;  // [value_dim], or null: no norm
};

// The same for latent attention: q's last rotary_dims numbers of each head are turned, in pairs; of kv the first
// `latent` numbers get a norm and the others are turned, and this row goes to the cache.
struct LatentJob {
    float* q;         // [tokens, heads, q_width], in place
    const float* kv;  // [tokens, latent + rotary_dims]
    int64_t tokens, heads, q_width;
    const float* gain;  // [latent]
    float epsilon;
    const float* cosines;  // [tokens, rotary_dims / 2]
    const float* sines;
    int64_t rotary_dims;
    CacheShape cache;  // with head_dim = latent + rotary_dims
    uint8_t* keys;
    const int32_t* slots;
};

// What an indexer says of one sequence's cached positions: the sum over its heads of weight * max(0, q . row).
struct IndexJob {
    const float* q;        // [tokens, heads, dim]
    const float* weights;  // [tokens, heads]
    int64_t tokens, heads, dim;
    CacheType type;
    int64_t block_tokens;
    const uint8_t* rows;  // [blocks][block_tokens][bytes of a row]
    const int32_t* block_table;
    int64_t count;  // entries: number n is of position n * step + step - 1
    float* out;     // [tokens, count]
    int64_t step = 1;
    float least = 0.0f;  // what a head says of a row is at least so much
};
constexpr int64_t kIndexTokens = 64;

// What makes keys and values of heads out of the rows of a latent cache: a key is a product of the row's first `latent`
// numbers, then its other numbers; a value is a product of the first ones, too.
struct Expansion {
    StackedWeight k_up;  // of each head: [latent, numbers of a key that are not turned]
    StackedWeight v_up;  // of each head: [value_dim, latent]
    // One row of a matrix as float32, see GemmKernels.
    void (*decode_row)(int type_id, const uint8_t* src, int64_t cols, float* out);

    int64_t plain() const { return k_up.first.cols; }
    int64_t value_dim() const { return v_up.first.rows; }
};

// Scores are added up and merged over spans of positions that are multiples of this.
constexpr int64_t kSpanTokens = 512;
// Positions of a word of AttentionJob::chosen: those of a group of keys, see cache.inl.
constexpr int64_t kWordPositions = 16;

// A factor on a token's scores: 1 + scale * ln(1 + (position + offset) / length), divided in whole numbers.
struct Temperature {
    float scale;  // 0: none
    int64_t length, offset;
};

// Causal attention of one sequence's tokens over its cached keys and values.
struct AttentionJob {
    const float* q;  // [tokens, heads, key_dim]
    const int32_t* positions;
    int64_t tokens, heads;
    CacheShape cache;
    const uint8_t* keys;
    const uint8_t* values;
    const int32_t* block_table;  // position p lies in block block_table[p / block_tokens]
    float scale;
    float softcap;   // 0: none; else scores become softcap * tanh(score / softcap)
    int64_t window;  // 0: none; else a token sees only the last `window` positions, its own included; see chunked
    float* out;      // [tokens, heads, value_dim]
    const float* sinks = nullptr;  // [heads], a score that takes part in the softmax and has no value; or null
    bool chunked = false;  // a token sees the positions from the last multiple of `window` on
    Temperature temperature = {0.0f, 1, 0};
    const Expansion* expansion = nullptr;  // of a latent cache: attention works on keys and values of heads
    int64_t item_heads = 16;               // the most query heads of an item over a latent cache
    // Where a cache is not latent, what tokens read of what they see, [tokens][chosen_lists][chosen_words], one list for all
    // key heads or one for each: bit b of word w is position 16 * w + b's, and one that the token sees is set. A row has words up to
    // its token's position. Null: all.
    const uint16_t* chosen = nullptr;
    int64_t chosen_words = 0, chosen_lists = 1;

    // The first position that a token at this one sees; it does not fall from one position to the next.
    int64_t first_seen(int64_t position) const {
        if (window == 0) return 0;
        if (chunked) return position / window * window;
        return position < window ? 0 : position + 1 - window;
    }

    int64_t key_dim() const {
        return expansion ? expansion->plain() + cache.head_dim - cache.latent : cache.head_dim;
    }
    int64_t value_dim() const { return expansion ? expansion->value_dim() : cache.value_dim(); }

    // Into how many items the query heads of one key head are cut: latent attention has one key head for all.
    int64_t slices() const {
        if (expansion) return heads;
        int64_t count = 1;
        if (cache.latent > 0)
            while (heads % count != 0 || heads / count > item_heads) ++count;
        return count;
    }
    // The words of one token and key head, or null.
    const uint16_t* chosen_of(int64_t token, int64_t kv_head) const {
        const int64_t list = chosen_lists == 1 ? 0 : kv_head;
        return chosen == nullptr ? nullptr : chosen + (token * chosen_lists + list) * chosen_words;
    }
    // Query heads of an item.
    int64_t group() const { return heads / (cache.kv_heads * slices()); }
};

// What one call computes: some tokens, with all query heads of one key head (or a slice of them), over some spans.
struct AttentionItem {
    int64_t job;
    int64_t slice;  // of kv_heads * slices()
    int64_t first_token, num_tokens;
    int64_t first_span, num_spans;
    float* partial;  // null: write the job's output; else the states of the spans, one after another
};

// One arithmetic of attention. The floats of states and of scratch are known to it alone.
struct AttentionKernels {
    // Items have at most so many query numbers; and not fewer rows (a token with one of its heads each) than this, also
    // where smaller ones would be shared better.
    int64_t most_numbers, least_rows;
    // Floats of scratch, 64-byte aligned, that `run` needs for items of so many tokens.
    int64_t (*scratch)(const AttentionJob& job, int64_t num_tokens);
    // Floats of one span's state for so many tokens.
    int64_t (*state)(const AttentionJob& job, int64_t num_tokens);
    void (*run)(const AttentionJob& job, const AttentionItem& item, float* scratch);
    // Merges the states at item.partial in order and writes the job's output.
    void (*merge)(const AttentionJob& job, const AttentionItem& item);
};

// How router logits become scores: over all experts together, over the chosen ones alone, or each by itself.
enum class Gating : int { Softmax = 1, Sigmoid = 2, SoftmaxChosen = 3, SqrtSoftplus = 4, NearBest = 64 };

// Logits lie near the best one if they are below it by at most this part of the larger of their size and the best.
constexpr float kNearBest = 0.02f;


// How a token's experts are chosen from its logits, and weighed.
struct RouteRule {
    int64_t chosen;
    Gating gating;
    const float* logit_bias;  // [experts], added to the logits; or null
    const float* bias;        // [experts], added to the scores for the choice alone; or null
    int64_t groups, groups_used;  // only the best groups' experts are chosen from,
    int64_t group_best;           // by the sum of so many of their best: one or two
    bool normalize;
    float min_sum;  // the sum of the chosen weights counts at least this much when normalising
    float scale;

    bool plain() const { return gating == Gating::Softmax && !logit_bias && !bias && groups == 1; }
};

struct RouteJob {
    const float* logits;  // [tokens, experts]
    int64_t tokens, experts;
    RouteRule rule;
    int32_t* ids;    // [tokens, chosen], best first, the lower id first among equals
    float* weights;  // [tokens, chosen]
    float* scratch = nullptr;  // route_scratch(job) floats per token
    const int32_t* given = nullptr;  // [tokens, chosen]: the ids, whose weights alone are asked for; or null

    bool plain() const { return rule.plain() && given == nullptr; }
};

// Logits, what weights are taken from, what decides, and a number per group.
inline int64_t route_scratch(const RouteJob& job) { return job.plain() ? 0 : 3 * job.experts + job.rule.groups; }

enum class Activation : int { Sigmoid = 0, Softplus = 1, Gelu = 2 };

// out = x times the activation of a gate of `gate_width` numbers per row: one, or one per number of x.
struct GateJob {
    const float* x;     // [rows, width]
    const float* gate;  // rows gate_stride apart
    int64_t rows, width, gate_width, gate_stride;
    Activation activation;
    float* out;  // [rows, width]; may be x
};

struct CombineJob {
    const float* residual;        // [tokens, width]
    const float* const* sources;  // [tokens, slots]: where each contribution lies
    int64_t tokens, slots, width;
    float* out;  // [tokens, width]; may be `residual`
};

// How what a part of a layer gives is normed before it is added to the residual stream.
struct PostNorm {
    const float* gain = nullptr;  // [width]; null: there is no such norm
    const float* first_gain = nullptr;  // [width], of two inputs that are normed before they are added; null: they are not
    const float* second_gain = nullptr;
    float epsilon = 0.0f, scale = 1.0f;
};

// out = (x + norm(y)) * scale, where y is `first`, first + second, or with gains of both norm(first) + norm(second). out
// may be any of the inputs.
struct PostNormJob {
    const float* x;  // [rows, width]
    const float* first;
    const float* second;  // or null
    int64_t rows, width;
    PostNorm norm;
    float* out;
};

// Several residual streams that are weighed and mixed as wholes: manifold-constrained hyper-connections.
struct StreamRule {
    const float* base;    // [(2 + streams) * streams]
    const float* scales;  // [3]: of the logits of weights, of shares and of the matrix
    float floor;
    int64_t rounds;  // at least one
};

// See `DenseKernels.take_streams` in kernels/dense_contract.py.
struct StreamsJob {
    const float* x;       // [tokens, streams, width]
    const float* logits;  // [tokens, (2 + streams) * streams]
    int64_t tokens, streams, width;
    StreamRule rule;
    float* taken;   // [tokens, width]
    float* rest;    // [tokens, streams, width]
    float* shares;  // [tokens, streams]
};
constexpr int64_t kMaxStreams = 16;

// Of each entry and number of width: the sum over its rows, in order, of the softmax of gates + places times the row.
struct PoolJob {
    const float* rows;    // [entries, count, width]
    const float* gates;   // the same; -infinity weighs zero, and is not that of all rows
    const float* places;  // [count, width]
    int64_t entries, count, width;
    float* out;  // [entries, width]
};

// What an expert computes of its gate's values g and its up values u, or of u alone.
enum class ExpertActivation : int {
    Silu = 0,         // silu(g) * u
    ClampedSilu = 1,  // c * sigmoid(1.702 c) * (d + 1), where c = min(g, 7) and d = u within -7 and 7
    Gelu = 2,         // gelu(g) * u, gelu by its approximation with tanh
    SquaredRelu = 3,  // max(u, 0)^2; there is no gate
    LimitedSilu = 4,  // min(silu(g), a) * d, where d = u within -b and b
    Relu = 5,         // max(g, 0) * u
};

// Of LimitedSilu, positive: the most that silu(g) is, and how far from zero u is at most.
struct SiluLimits {
    float gate = 0.0f, up = 0.0f;

    bool operator==(const SiluLimits& other) const { return gate == other.gate && up == other.up; }
};

inline bool has_gate(ExpertActivation activation) { return activation != ExpertActivation::SquaredRelu; }

struct DenseKernels {
    // out[r] = x[r] / sqrt(mean(x[r]^2) + epsilon) * gain; squares are added in double.
    void (*rms_norm)(const float* x, const float* gain, float epsilon, int64_t rows, int64_t width,
                     float* out);
    void (*heads)(const HeadsJob& job, int64_t first_token, int64_t last_token);
    void (*latent)(const LatentJob& job, int64_t first_token, int64_t last_token);
    AttentionKernels attention;
    void (*route)(const RouteJob& job, int64_t first_token, int64_t last_token);
    void (*gate)(const GateJob& job, int64_t first_row, int64_t last_row);
    void (*combine)(const CombineJob& job, int64_t first_token, int64_t last_token);
    // out[i] = silu(gate[i]) * up[i]
    void (*silu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    // The other formulas of experts, see ExpertActivation. squared_relu does not read `gate`.
    void (*clamped_silu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    void (*gelu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    void (*squared_relu)(const float* gate, const float* up, int64_t count, float* out);
    void (*relu_multiply)(const float* gate, const float* up, int64_t count, float* out);
    void (*limited_silu_multiply)(const float* gate, const float* up, int64_t count, SiluLimits limits, float* out);
    void (*delta_tokens)(const DeltaJob& job, const StateRun& run, int64_t first_token, int64_t last_token);
    void (*delta_columns)(const DeltaJob& job, const StateRun& run, int64_t head, int64_t first, int64_t columns,
                          float* scratch);
    void (*delta_output)(const DeltaJob& job, int64_t first_row, int64_t last_row);
    void (*short_conv)(const ShortConvJob& job, const StateRun& run, int64_t first_token, int64_t last_token);
    void (*mamba_tokens)(const MambaJob& job, const StateRun& run, int64_t first_token, int64_t last_token);
    void (*mamba_columns)(const MambaJob& job, const StateRun& run, int64_t head, int64_t first, int64_t columns,
                          float* scratch);
    void (*mamba_output)(const MambaJob& job, int64_t first_token, int64_t last_token);
    void (*selective_tokens)(const SelectiveJob& job, const StateRun& run, int64_t first_token, int64_t last_token);
    // scratch: 2 * state_dim * kMambaColumns floats
    void (*selective_columns)(const SelectiveJob& job, const StateRun& run, int64_t first, int64_t columns,
                              float* scratch);
    // scratch: 2 * width floats
    void (*add_normed)(const PostNormJob& job, int64_t first_row, int64_t last_row, float* scratch);
    // out[i] = cap * tanh(x[i] / cap)
    void (*softcap)(const float* x, int64_t count, float cap, float* out);
    // Of entries [first, first + count), at most kIndexTokens of them. scratch: kIndexTokens * dim floats
    void (*index_scores)(const IndexJob& job, int64_t first, int64_t count, float* scratch);
    void (*take_streams)(const StreamsJob& job, int64_t first_token, int64_t last_token);
    void (*pool_rows)(const PoolJob& job, int64_t entry, int64_t first_column, int64_t last_column);
};

using ExpertInnerFn = void (*)(const float* gate, const float* up, int64_t count, float* out);

// Of those without limits.
inline ExpertInnerFn expert_inner_fn(const DenseKernels& kernels, ExpertActivation activation) {
    switch (activation) {
        case ExpertActivation::Silu: break;
        case ExpertActivation::ClampedSilu: return kernels.clamped_silu_multiply;
        case ExpertActivation::Gelu: return kernels.gelu_multiply;
        case ExpertActivation::SquaredRelu: return kernels.squared_relu;
        case ExpertActivation::Relu: return kernels.relu_multiply;
        case ExpertActivation::LimitedSilu: return nullptr;
    }
    return kernels.silu_multiply;
}

namespace portable { extern const DenseKernels dense_kernels; }
namespace avx2 { extern const DenseKernels dense_kernels; }
namespace avx512 { extern const DenseKernels dense_kernels; }
namespace neon { extern const DenseKernels dense_kernels; }

}  // namespace thermocline
