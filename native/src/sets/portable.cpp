// The kernels of the instruction set "portable"; the flags are in CMakeLists.txt.
#define THERMOCLINE_SET portable
#include "sets/set.inl"
