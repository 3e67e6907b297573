// Matrix products in the tiles of the compute's set, for weights of types that tiles take.
#pragma once

#include "thermocline/matmul.h"
#include "thermocline/unpack.h"

namespace thermocline::tiles {

// Whether weights of the type are multiplied in tiles. F32 and F16 hold more than bfloat16 can.
inline bool takes(int type_id) {
    UnpackInfo info{};
    return type_id == kBF16 || unpack_info(type_id, info);
}

void multiply_all(const Compute& compute, const float* x, int64_t tokens, const Product* products, int count);
void expert_outputs(const Compute& compute, const ExpertWork& work, float* out);
void expert_sum(const Compute& compute, const ExpertWork& work, const int32_t* pair_of, int64_t slots,
                const float* residual, float* out);

}  // namespace thermocline::tiles
