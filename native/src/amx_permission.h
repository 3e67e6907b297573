// Whether this process may use matrix tiles.
#pragma once

namespace thermocline {

// The processor has bfloat16 tiles, and AVX-512 with bfloat16 and byte permutations; the operating system saves
// tile registers.
bool has_bf16_tiles();

// Asks the operating system for the use of tiles by every thread of the process, now and later; it is asked
// once. Tile registers are large, so that Linux gives them only to those who ask, and refuses where a thread
// has an alternative signal stack that could not hold them.
bool ask_for_tiles();

}  // namespace thermocline
