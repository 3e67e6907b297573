// The tile kernels of one instruction set; compiled like set.inl, which holds all that tiles do not do.
#include <cstddef>
#include <cstdint>

#include <immintrin.h>

#define THERMOCLINE_SIMD_AVX512
#include "sets/activations.inl"
#include "sets/attention_source.inl"
#include "sets/simd.h"
#include "thermocline/formats.h"
#include "thermocline/tile_kernels.h"

namespace thermocline::THERMOCLINE_SET {
namespace {

#include "sets/transpose.inl"
#if defined(__AMX_BF16__)
#include "sets/tile_ops.inl"
#else
#include "sets/tile_ops_emulated.inl"
#endif
#include "sets/tile_decode.inl"
#include "sets/tile_nibbles.inl"
#include "sets/tile_multiply.inl"
#include "sets/tile_tokens.inl"
#include "sets/tile_pairs.inl"
#include "sets/tile_expand.inl"
#include "sets/tile_attention.inl"

}  // namespace

extern const TileKernels tile_kernels;
const TileKernels tile_kernels = {begin_tiles,   end_tiles,  pack_tokens, start_run,
                                  multiply_pair, pack_inner, turn, tile_attention_kernels};

}  // namespace thermocline::THERMOCLINE_SET
