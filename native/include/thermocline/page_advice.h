// Which pages of a mapped file are wanted soon, and which are there.
#pragma once

#include <cstdint>

namespace thermocline {

// Advises the pages of bytes [start, end) of a mapping as needed soon, at most `piece_bytes` per call:
// the kernel cuts a longer call short without saying so. Returns the bytes advised, counted from the
// first page's start, or -errno.
int64_t will_need(const uint8_t* base, int64_t start, int64_t end, int64_t piece_bytes);

// How many of the pages that hold these bytes of a mapping are in memory, or -errno.
int64_t resident_pages(const uint8_t* base, const int64_t* offsets, int64_t count);

}  // namespace thermocline
