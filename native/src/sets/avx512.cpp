// The kernels of the instruction set "avx512"; the flags are in CMakeLists.txt.
#define THERMOCLINE_SET avx512
#include "sets/set.inl"
