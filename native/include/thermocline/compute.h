// What a job runs on: the threads and the functions of one instruction set.
#pragma once

#include "thermocline/gemm_kernels.h"
#include "thermocline/isa.h"
#include "thermocline/thread_pool.h"

namespace thermocline {

struct Compute {
    ThreadPool& pool;
    const KernelSet& set;
};

}  // namespace thermocline
