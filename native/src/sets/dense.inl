// The table of one set's dense kernels.
#pragma once

#include "attention.inl"
#include "delta.inl"
#include "index.inl"
#include "pool.inl"
#include "recurrent.inl"
#include "routing.inl"
#include "selective.inl"
#include "streams.inl"

namespace thermocline::THERMOCLINE_SET {

const DenseKernels dense_kernels = {
    rms_norm,      heads,         latent,       attention_kernels,
    route,         gate,          combine,      silu_multiply,  clamped_silu_multiply, gelu_multiply, squared_relu,
    relu_multiply, limited_silu_multiply,
    delta_tokens,  delta_columns, delta_output, short_conv,     mamba_tokens,  mamba_columns, mamba_output,
    selective_tokens, selective_columns,
    add_normed,    softcap,       index_scores, take_streams, pool_rows};

}  // namespace thermocline::THERMOCLINE_SET
