// Dense kernels of the set `avx512`; compiled with its flags, see CMakeLists.txt.
#define THERMOCLINE_SET avx512
#define THERMOCLINE_SIMD_AVX512
#include "dense.inl"
