// What this machine can do at most, measured with the same threads that compute.
#pragma once

#include <cstdint>

#include "thermocline/compute.h"

namespace thermocline {

// Reads every byte of [data, data + bytes) once, with all threads; returns a checksum of the words.
uint64_t read_all(const Compute& compute, const uint8_t* data, int64_t bytes);

// Multiplies an unpacked panel that stays in the first-level cache by 24 tokens, `rounds` times on every
// thread; returns the multiply-adds done. What a prompt can reach when nothing else costs time.
int64_t multiply_in_cache(const Compute& compute, int64_t rounds);

}  // namespace thermocline
