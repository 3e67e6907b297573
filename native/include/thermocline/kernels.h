// Kernels beside the matrix products. They take pointers and sizes, allocate only scratch, and write only
// to caller-owned outputs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// Advises the pages of bytes [start, end) of a mapping as needed soon, at most `piece_bytes` per call:
// the kernel cuts a longer call short without saying so. Returns the bytes advised, counted from the
// first page's start, or -errno.
int64_t will_need(const uint8_t* base, int64_t start, int64_t end, int64_t piece_bytes);

}  // namespace thermocline
