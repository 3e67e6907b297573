// Dense kernels of the set `avx2`; compiled with its flags, see CMakeLists.txt.
#define THERMOCLINE_SET avx2
#define THERMOCLINE_SIMD_AVX2
#include "dense.inl"
