// The tile kernels of the instruction set "amx"; the flags are in CMakeLists.txt.
#define THERMOCLINE_SET amx
#include "sets/tile_set.inl"
