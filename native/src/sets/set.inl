// One instruction set: includes every kernel source and exports one table. Compiled once per set, with that
// set's flags. Nothing here may be shared between sets by the linker, since the copy that it kept could
// use instructions that the machine lacks: no standard library templates, and all but the table is local.
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "thermocline/formats.h"
#include "thermocline/gemm_kernels.h"
#include "thermocline/unpack.h"

#include "sets/unpack.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

#include "sets/lanes.inl"
#include "sets/transpose.inl"
#include "sets/pack.inl"
#if defined(__AVX512F__)
#include "sets/pack_avx512.inl"
#endif
#include "sets/quantize.inl"
#include "sets/gemm.inl"
#if defined(__AVX2__)
#include "sets/rows.inl"
#include "sets/rows_plain.inl"
#else
PlainRowsFn find_plain_rows(int) { return nullptr; }
#endif
#if defined(__AVX512F__)
#include "sets/rows_avx512.inl"
#include "sets/pack_blocks_avx512.inl"
#elif defined(__AVX2__)
#include "sets/rows_avx2.inl"
#include "sets/pack_avx2.inl"
#else
RowsFn find_rows(int, const QuantForm&, int64_t) { return nullptr; }
#endif

#undef THERMOCLINE_FORCED

}  // namespace

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {quantize,     pack,        multiply_panel, pack_float,
                                  multiply_float_panel, add_slots, find_rows, find_plain_rows, find_unpack, decode_row};

}  // namespace thermocline::THERMOCLINE_SET
