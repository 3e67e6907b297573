// Dense kernels of the set `neon`; compiled with its flags, see CMakeLists.txt.
#define THERMOCLINE_SET neon
#define THERMOCLINE_SIMD_NEON
#include "dense.inl"
