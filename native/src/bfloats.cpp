// See bfloats.h. Plain loops, which the compiler turns into those of the registers that every processor has.
#include "thermocline/bfloats.h"

#include <cstring>

namespace thermocline {

void pack_bfloats(const float* values, size_t count, uint16_t* out) {
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits = 0;
        std::memcpy(&bits, values + i, sizeof bits);
        const uint32_t nearest_even = bits + 0x7FFFU + ((bits >> 16) & 1U);
        // Rounding up would turn some NaNs into infinity.
        const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
        out[i] = static_cast<uint16_t>((is_nan ? bits | 0x400000U : nearest_even) >> 16);
    }
}

void unpack_bfloats(const uint16_t* packed, size_t count, float* out) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = static_cast<uint32_t>(packed[i]) << 16;
        std::memcpy(out + i, &bits, sizeof bits);
    }
}

}  // namespace thermocline
