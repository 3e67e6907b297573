// The kernels of the instruction set "avxvnni"; the flags are in CMakeLists.txt.
#define THERMOCLINE_SET avxvnni
#include "sets/set.inl"
