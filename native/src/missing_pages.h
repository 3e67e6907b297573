// Weights of a mapped file that may not be in memory yet. A page that compute misses comes alone, and takes as long as a
// hundred of them together; so what is there is computed first, and what is not is asked for in larger pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "thermocline/matmul.h"

namespace thermocline {

// Puts first the experts whose matrices are in memory with all their pages, and marks the others; the order within is
// kept. Asks once per matrix: with all there, nothing is asked per piece.
void put_present_first(std::vector<ExpertGroup>& groups);

// Has the pages of some bytes read if one of them is missing. Does not wait.
void ask_for(const uint8_t* from, int64_t bytes);

}  // namespace thermocline
