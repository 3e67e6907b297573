// One form for every quantised tensor type, as integer dot products want it:
//
//     weight = scale * (q - offset) - minimum        q an unsigned byte
//
// In this order of float32 operations, none of them fused, the weight is to the bit what the gguf
// package decodes. Types differ in the constants below only.
#pragma once

#include <cstdint>

namespace thermocline {

struct UnpackInfo {
    int offset;
    int group;         // columns that share a scale (and a minimum): 16 or 32
    bool has_minimum;  // false: minimum is 0 everywhere; true: offset is 0
    int largest;       // no q is above it
    int64_t block_elements;
    int64_t block_bytes;
};

// False for types that are no quantised blocks (F32, F16, BF16, integers, unknown ids).
bool unpack_info(int type_id, UnpackInfo& info);

// Unpacks `count` columns (a multiple of the type's block, at most 256) of one row that begin at the
// block `src`: q[count], scale[count / 16] and minimum[count / 16], one per 16 columns whatever the
// group is. `minimum` is left as it was where the type has none. A type with a codebook (codebooks.h)
// must have been given it before.
using UnpackFn = void (*)(const uint8_t* src, int64_t count, uint8_t* q, float* scale, float* minimum);

}  // namespace thermocline
