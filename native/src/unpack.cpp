#include "thermocline/unpack.h"

namespace thermocline {

// Offsets put the smallest q at or above 0 and, where eight bits are not needed, the largest below 128.
bool unpack_info(int type_id, UnpackInfo& info) {
    switch (type_id) {
        case 2: info = {8, 32, false, 15, 32, 18}; return true;       // Q4_0
        case 3: info = {0, 32, true, 15, 32, 20}; return true;        // Q4_1
        case 6: info = {16, 32, false, 31, 32, 22}; return true;      // Q5_0
        case 7: info = {0, 32, true, 31, 32, 24}; return true;        // Q5_1
        case 8: info = {128, 32, false, 255, 32, 34}; return true;    // Q8_0
        case 10: info = {0, 16, true, 3, 256, 84}; return true;       // Q2_K
        case 11: info = {4, 16, false, 7, 256, 110}; return true;     // Q3_K
        case 12: info = {0, 32, true, 15, 256, 144}; return true;     // Q4_K
        case 13: info = {0, 32, true, 31, 256, 176}; return true;     // Q5_K
        case 14: info = {32, 16, false, 63, 256, 210}; return true;   // Q6_K
        case 16: info = {64, 32, false, 127, 256, 66}; return true;   // IQ2_XXS
        case 17: info = {64, 16, false, 127, 256, 74}; return true;   // IQ2_XS
        case 18: info = {64, 32, false, 127, 256, 98}; return true;   // IQ3_XXS
        case 19: info = {9, 32, false, 18, 256, 50}; return true;     // IQ1_S
        case 20: info = {128, 32, false, 255, 32, 18}; return true;   // IQ4_NL
        case 21: info = {16, 32, false, 31, 256, 110}; return true;   // IQ3_S
        case 22: info = {64, 16, false, 127, 256, 82}; return true;   // IQ2_S
        case 23: info = {128, 32, false, 255, 256, 136}; return true; // IQ4_XS
        case 29: info = {9, 16, false, 18, 256, 56}; return true;     // IQ1_M
        case 34: info = {1, 32, false, 2, 256, 54}; return true;      // TQ1_0
        case 35: info = {1, 32, false, 2, 256, 66}; return true;      // TQ2_0
        case 39: info = {12, 32, false, 24, 32, 17}; return true;     // MXFP4
        case 40: info = {12, 16, false, 24, 64, 36}; return true;     // NVFP4
    }
    return false;
}

}  // namespace thermocline
