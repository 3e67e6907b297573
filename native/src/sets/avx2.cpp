// The kernels of the instruction set "avx2"; the flags are in CMakeLists.txt.
#define THERMOCLINE_SET avx2
#include "sets/set.inl"
