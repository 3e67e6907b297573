// Dense kernels of the set `portable`; compiled with its flags, see CMakeLists.txt.
#define THERMOCLINE_SET portable
#include "dense.inl"
