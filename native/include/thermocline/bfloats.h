// Numbers of 16 bits in the messages of expert workers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// Rounds to bfloat16, to nearest even; a NaN stays one.
void pack_bfloats(const float* values, size_t count, uint16_t* out);

// Widens bfloat16.
void unpack_bfloats(const uint16_t* packed, size_t count, float* out);

}  // namespace thermocline
