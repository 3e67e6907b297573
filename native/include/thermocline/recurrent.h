// Short convolutions, Mamba2 and the first Mamba over some sequences' tokens; see recurrent_kernels.h. One call, some jobs on the pool.
#pragma once

#include "thermocline/dense.h"
#include "thermocline/recurrent_kernels.h"

namespace thermocline {

// Fill job.out, and move the states of the runs' slots on. Scratch is found here.
void short_convolution(const Dense& dense, const ShortConvJob& job);
void mamba(const Dense& dense, MambaJob job);
// The first Mamba in two parts, between which products take what the first gives. Each fills job.out; the first moves
// conv_states on, the second states.
void selective_convolution(const Dense& dense, const SelectiveJob& job);
void selective_scan(const Dense& dense, const SelectiveJob& job);

}  // namespace thermocline
