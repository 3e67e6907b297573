// The parts of a layer that are not products with weights: norms, rotary embedding, the key-value
// cache, attention, routing, and the sum of expert outputs. Each function is one job on a thread pool;
// it returns when all is done, writes only to caller-owned outputs, and checks nothing: sizes, block
// tables and slots must be in range.
//
// A token's numbers depend on the set of kernels and on the token alone, never on the number of
// threads or on which tokens are computed together.
#pragma once

#include <cstdint>

#include "thermocline/dense_kernels.h"
#include "thermocline/matmul.h"
#include "thermocline/thread_pool.h"

namespace thermocline {

struct Dense {
    const DenseKernels& kernels;
    ThreadPool& pool;
};

// False when the id is none of CacheType's.
bool cache_type(int type_id, CacheType& type);
// Bytes of one head's key, or value, of one token.
int64_t cache_row_bytes(CacheType type, int64_t head_dim);

// out[r] = x[r] / sqrt(mean(x[r]^2) + epsilon) * gain     x, out: [rows, width], may be the same.
void rms_norm(const Dense& dense, const float* x, const float* gain, float epsilon, int64_t rows,
              int64_t width, float* out);
// The same of x[r] - mean(x[r]), plus the bias; without one it is null.
void layer_norm(const Dense& dense, const float* x, const float* gain, const float* bias, float epsilon, int64_t rows,
                int64_t width, float* out);

// Whether a norm takes the mean off first, and its bias [width], or null.
struct Centering {
    bool centers = false;
    const float* bias = nullptr;
};

// The one norm or the other.
void norm_rows(const Dense& dense, const float* x, const float* gain, const Centering& centering, float epsilon,
               int64_t rows, int64_t width, float* out);

// cosines, sines: [tokens, count] of position * frequency, taken in double, times `magnitude`.
void rope_table(const Dense& dense, const int32_t* positions, int64_t tokens, const double* frequencies,
                int64_t count, double magnitude, float* cosines, float* sines);

// Norm, rotary embedding and append of one chunk; see HeadsJob. head_dim is at most kMaxHeadDim.
constexpr int64_t kMaxHeadDim = 1152;
void prepare_heads(const Dense& dense, const HeadsJob& job);
void prepare_latent(const Dense& dense, const LatentJob& job);

// One job per sequence, all of one type of cache; they share the threads.
void attention(const Compute& compute, Form form, const AttentionJob* jobs, int64_t count);

// See IndexJob.
void index_scores(const Dense& dense, const IndexJob& job);

// The best experts of each token; see RouteJob, whose scratch is found here. chosen is at most experts.
void route(const Dense& dense, RouteJob job);

void gate(const Dense& dense, const GateJob& job);

// See PostNormJob.
void add_normed(const Dense& dense, const PostNormJob& job);

// out = cap * tanh(x / cap)     x, out: [rows, width], may be the same.
void softcap(const Dense& dense, const float* x, float cap, int64_t rows, int64_t width, float* out);

// See StreamsJob. There are 2 to kMaxStreams streams.
void take_streams(const Dense& dense, const StreamsJob& job);

// See PoolJob. There is at least one row.
void pool_rows(const Dense& dense, const PoolJob& job);

// One tier's contributions: values[i] belongs to token rows[i] and its slot slots[i].
struct Contributions {
    const int32_t* rows;
    const int32_t* slots;
    const float* values;  // [count, width]
    int64_t count;
};

// out[t] = residual[t] + ((slot 0 + slot 1) + slot 2) + ...     residual, out: [tokens, width], may be
// the same. False, and nothing written, unless every (token, slot) has exactly one contribution.
bool combine(const Dense& dense, const float* residual, const Contributions* parts, int64_t count,
             int64_t tokens, int64_t slots, int64_t width, float* out);

}  // namespace thermocline
