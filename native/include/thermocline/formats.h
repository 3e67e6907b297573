// The tensor types that are computed from, and a weight matrix as it lies in the file.
#pragma once

#include <cstdint>

namespace thermocline {

// ggml's ids of the types that hold plain numbers; every other id that is computed from is a block
// type, see unpack.h.
enum PlainType : int { kF32 = 0, kF16 = 1, kBF16 = 30 };

struct FormatInfo {
    int64_t block_elements;
    int64_t block_bytes;
};

// False when the id is of no type that is computed from.
bool format_info(int type_id, FormatInfo& info);

// `rows` rows of `cols` elements, row after row. A product with it is multiplied by `scale`, which files of some types
// keep beside the blocks.
struct Weight {
    int type_id;
    const uint8_t* data;
    int64_t rows;
    int64_t cols;
    int64_t row_bytes;
    float scale = 1.0f;

    const uint8_t* row(int64_t r) const { return data + r * row_bytes; }
};

// The same matrix of all experts, or of all heads, one after another.
struct StackedWeight {
    Weight first;
    int64_t stride;  // bytes from one to the next
    const float* scales = nullptr;  // one for each, or null: all are 1

    Weight operator[](int64_t index) const {
        Weight weight = first;
        weight.data += index * stride;
        if (scales) weight.scale = scales[index];
        return weight;
    }
};

}  // namespace thermocline
