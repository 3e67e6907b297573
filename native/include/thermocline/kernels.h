// Kernels beside the matrix products. They take pointers and sizes, allocate only scratch, and write only
// to caller-owned outputs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

struct AttentionShape {
    int64_t tokens, heads, kv_heads, head_dim;
    int64_t block_tokens;  // positions per cache block
};

// Causal attention of one sequence over a cache of blocks.
//   q, out: [tokens, heads, head_dim]; k, v: [slots, kv_heads, head_dim]
//   block_table[p / block_tokens] is the block that holds position p; positions: [tokens].
// Token t sees positions 0..positions[t] of its own sequence.
void attention(const AttentionShape& s, const float* q, const float* k, const float* v,
               const int32_t* block_table, const int32_t* positions, float scale, float* out);

// Advises the pages of bytes [start, end) of a mapping as needed soon, at most `piece_bytes` per call:
// the kernel cuts a longer call short without saying so. Returns the bytes advised, counted from the
// first page's start, or -errno.
int64_t will_need(const uint8_t* base, int64_t start, int64_t end, int64_t piece_bytes);

}  // namespace thermocline
