// The instruction sets that kernels are compiled for, and which of them this machine has.
#pragma once

#include <cstddef>

#include "thermocline/dense_kernels.h"
#include "thermocline/gemm_kernels.h"

namespace thermocline {

struct KernelSet {
    const char* name;
    const GemmKernels* gemm;
    const DenseKernels* dense;
};

// Narrowest first. `available`: the processor and the operating system have it.
struct SetChoice {
    KernelSet set;
    bool available;
};

// Every set of this build, and how many there are.
const SetChoice* kernel_sets(size_t& count);

// nullptr when the build has no set of that name.
const SetChoice* find_kernel_set(const char* name);

}  // namespace thermocline
