// The tile kernels of "amx" with the tile instructions written out, so that they run on any processor with
// AVX-512: for tests, not for speed.
#define THERMOCLINE_SET amx_emulated
#include "sets/tile_set.inl"
