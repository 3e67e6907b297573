// Multi-head latent attention: keys and values of all heads are products of one row per token, which is all that
// the cache holds. In the absorbed form queries are multiplied by the keys' matrices instead, and what attention reads by
// the values'. In the expanded form keys and values are made of the rows.
#pragma once

#include <cstdint>

#include "thermocline/compute.h"
#include "thermocline/dense.h"
#include "thermocline/matmul.h"

namespace thermocline {

struct LatentPart {
    const float* norm;  // [hidden]
    bool has_low;       // q is a product of two matrices with a norm between them
    Weight low;         // [rank, hidden]
    const float* low_gain;  // [rank]
    Weight q;               // [heads * (plain + rotary_dims), hidden or rank]
    Weight kv;              // [latent + rotary_dims, hidden]
    const float* kv_gain;   // [latent]
    StackedWeight k_up;     // of each head: [latent, plain]
    StackedWeight v_up;     // of each head: [value_dim, latent]
    int64_t heads;
    Weight output;  // [hidden, heads * value_dim]
    float epsilon, scale;
    Temperature temperature;  // see AttentionJob
    Weight gate = {};  // [heads, hidden], whose sigmoids multiply what heads give; without data: none

    int64_t latent() const { return v_up.first.cols; }
    int64_t plain() const { return k_up.first.cols; }  // numbers of a head of q that are not turned
    int64_t q_width() const { return q.rows / heads; }
};

}  // namespace thermocline
