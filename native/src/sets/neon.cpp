// The kernels of the instruction set "neon"; the flags are in CMakeLists.txt.
#define THERMOCLINE_SET neon
#include "sets/set.inl"
