// The gated delta rule of some sequences' tokens; see delta_kernels.h. One call, some jobs on the thread pool.
#pragma once

#include "thermocline/delta_kernels.h"
#include "thermocline/dense.h"

namespace thermocline {

// Fills job.out, and moves the states of the runs' slots on. job.convolved and job.gates are found here.
void delta_rule(const Dense& dense, DeltaJob job);

}  // namespace thermocline
