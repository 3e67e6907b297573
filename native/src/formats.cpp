#include "thermocline/formats.h"

#include "thermocline/unpack.h"

namespace thermocline {

bool format_info(int type_id, FormatInfo& info) {
    UnpackInfo blocks{};
    if (unpack_info(type_id, blocks)) {
        info = {blocks.block_elements, blocks.block_bytes};
        return true;
    }
    switch (type_id) {
        case kF32: info = {1, 4}; return true;
        case kF16: case kBF16: info = {1, 2}; return true;
        default: return false;
    }
}

}  // namespace thermocline
