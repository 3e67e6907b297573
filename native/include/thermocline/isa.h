// The instruction sets that kernels are compiled for, and which of them this machine has.
#pragma once

#include <cstddef>

#include "thermocline/dense_kernels.h"
#include "thermocline/gemm_kernels.h"
#include "thermocline/tile_kernels.h"

namespace thermocline {

struct KernelSet {
    const char* name;
    const GemmKernels* gemm;
    const DenseKernels* dense;
    const TileKernels* tiles = nullptr;  // for prompts; nullptr where the set has no matrix tiles
    bool asks_nearest = false;           // on this processor few tokens' weights are best asked for into the nearest cache
};

// Narrowest first. `available`: the processor and the operating system have it. `emulated`: it computes what
// another set would, slowly, for tests; nobody is to pick it by himself.
struct SetChoice {
    KernelSet set;
    bool available;
    bool emulated = false;
};

// Every set of this build, and how many there are.
const SetChoice* kernel_sets(size_t& count);

// nullptr when the build has no set of that name.
const SetChoice* find_kernel_set(const char* name);

}  // namespace thermocline
