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
#include "thermocline/isa.h"
#include "thermocline/unpack.h"

#include "sets/unpack.inl"

#define THERMOCLINE_NAME_OF(set) #set
#define THERMOCLINE_NAME(set) THERMOCLINE_NAME_OF(set)

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

void silu_multiply(const float* gate, const float* up, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = gate[i] / (1.0f + __builtin_expf(-gate[i])) * up[i];
}

constexpr GemmKernels kGemm = {quantize, pack, multiply_panel, pack_float, multiply_float_panel,
                               silu_multiply, find_unpack, decode_row};

}  // namespace

extern const KernelSet kSet;
const KernelSet kSet = {THERMOCLINE_NAME(THERMOCLINE_SET), &kGemm};

}  // namespace thermocline::THERMOCLINE_SET
