// The codebooks of the IQ1, IQ2 and IQ3 types. They are data of the format's authors, so that they are
// not compiled in: whoever opens a file hands them over (thermocline/kernels/codebooks.py).
//
// A codebook is `entries` times `width` bytes:
//     IQ2_XXS, IQ2_XS, IQ2_S   8 magnitudes an entry
//     IQ3_XXS, IQ3_S           4 magnitudes an entry
//     IQ1_S and IQ1_M (one)    8 times 8 * (value + 1), value one of -1, 0, 1
#pragma once

#include <cstdint>

namespace thermocline {

// Publishes a copy that lives as long as the process. Any thread may call it at any time; equal bytes
// again change nothing. False, and nothing is stored, if the type has no codebook, the size or a value
// is not one that the type can have, or other bytes were published before.
bool set_codebook(int type_id, const uint8_t* bytes, int64_t size);

// The published copy, aligned to 64 bytes; nullptr before that, and for types without one.
const uint8_t* codebook(int type_id);

// Whether the type has a codebook and none was published yet.
bool codebook_missing(int type_id);

}  // namespace thermocline
