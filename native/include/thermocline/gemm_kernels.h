// What one instruction set offers to matrix products: a table of functions over panels.
//
// A panel is 32 rows (two strips of 16) by up to 256 columns of a weight matrix, laid out so that the
// 16 rows of a strip are the lanes of a vector. Each output element is computed in one lane, over the
// columns in order: its value depends on nothing but its row, its token and the instruction set.
#pragma once

#include <cstdint>

#include "thermocline/unpack.h"

namespace thermocline {

constexpr int kStripRows = 16;
constexpr int kStrips = 2;
constexpr int kPanelRows = kStripRows * kStrips;
constexpr int kSpan = 256;     // columns of a panel
constexpr int kGroupMin = 16;  // fewest columns that share a scale
constexpr int kMaxGroups = kSpan / kGroupMin;

// How a quantised product is done: weight = scale * (q - offset) - minimum, activation = scale * a.
struct QuantForm {
    int group;       // columns that share the scales of weight and of activation: 16 or 32
    int offset;      // of the weight's type; the dot product starts at -offset * sum(a)
    bool has_minimum;
    bool seven_bits;  // the weight's q fits seven bits

    bool operator==(const QuantForm&) const = default;
};

struct alignas(64) QuantPanel {
    uint8_t q[kStrips][kSpan / 4][kStripRows][4];  // four columns of a row lie together
    float scale[kStrips][kMaxGroups][kStripRows];
    float minimum[kStrips][kMaxGroups][kStripRows];
    int largest[kStrips];  // no q of the strip is above it: how many products a narrow sum holds
};

struct alignas(64) FloatPanel {
    float w[kStrips][kSpan][kStripRows];
};

// Where one token's quantised activations lie, from the token's base address.
struct ActivationLayout {
    int64_t row_bytes;
    int64_t scale;  // float per group
    int64_t start;  // int32 per group: -offset * sum(a)
    int64_t sum;    // float per group: scale * sum(a); only when the form has a minimum

    static ActivationLayout of(int64_t cols, const QuantForm& form) {
        const int64_t groups = (cols + form.group - 1) / form.group;
        const int64_t values = (cols + 63) / 64 * 64, numbers = (groups * 4 + 63) / 64 * 64;
        return {values + numbers * (form.has_minimum ? 3 : 2), values, values + numbers,
                values + 2 * numbers};
    }
};

// Bytes that will be read soon, asked for beside other work; none where bytes is 0.
struct Ahead {
    const uint8_t* from = nullptr;
    int64_t bytes = 0;
    bool nearest = false;  // they are wanted in the nearest cache, not in the next one
};

// Up to 16 rows and up to kSpan columns (a multiple of the type's block) to be packed.
struct PackSource {
    const uint8_t* src;  // where the first row's columns begin
    int64_t row_bytes;
    int rows;            // missing rows become zero
    int64_t count;       // of columns
    Ahead ahead;         // for products row by row; packing asks for nothing
};

// c[t][0 .. 16) = 16 rows of `from.count` columns, a multiple of the type's block, times some tokens, straight from
// the file's bytes; c[t] begins kPanelRows floats after c[t - 1]. Equal to the bit to pack and multiply.
using RowsFn = void (*)(int type_id, const QuantForm& form, const PackSource& from, const uint8_t* const* bases,
                        const ActivationLayout& layout, float* c);

// c[0 .. 16 * strips) = 16 rows of F16, BF16 or F32 of each strip, of equal columns, times one token x. Equal to the bit
// to pack_float and multiply_float.
using PlainRowsFn = void (*)(const PackSource* from, int strips, const float* x, float* c);

struct GemmKernels {
    // Rounds one token's x[cols] to int8 with a scale per group; cols is a multiple of the group.
    void (*quantize)(const float* x, int64_t cols, const QuantForm& form, const ActivationLayout& layout,
                     uint8_t* out);
    // Unpacks rows into a strip of the panel.
    void (*pack)(int type_id, const PackSource& from, int group, int strip, QuantPanel& panel);
    // c[t][32] (+)= panel times token t, for `tokens` tokens; `bases` are the tokens' activations,
    // `column` is where the panel's columns begin. The first span of a row sets c. Asks for ahead[kStrips] meanwhile.
    void (*multiply)(const QuantPanel& panel, const QuantForm& form, int64_t count, int64_t column,
                     const uint8_t* const* bases, const ActivationLayout& layout, int64_t tokens,
                     bool first, const Ahead* ahead, float* c);
    // The same for F32, F16 and BF16 weights, with float activations.
    void (*pack_float)(int type_id, const PackSource& from, int strip, FloatPanel& panel);
    void (*multiply_float)(const FloatPanel& panel, int64_t count, int64_t column, const float* const* x,
                           int64_t tokens, bool first, const Ahead* ahead, float* c);
    // out[i] = residual[i] + ((scales[pairs[0]] * sums[pairs[0]][i] + scales[pairs[1]] * sums[pairs[1]][i]) + ...)
    // for i < width, over `slots` pairs; sums[pair][i] is at sums + pair * stride + i, and sums may be read up to
    // the next multiple of 16.
    void (*add_slots)(const float* sums, int64_t stride, const float* scales, const int32_t* pairs, int64_t slots,
                      const float* residual, int64_t width, float* out);
    // For a few tokens; nullptr where the set has none for so many.
    RowsFn (*find_rows)(int type_id, const QuantForm& form, int64_t tokens);
    // For one token; nullptr where the set has none for the type.
    PlainRowsFn (*find_plain_rows)(int type_id);
    // How a block type is unpacked; nullptr where unpack_info has nothing.
    UnpackFn (*find_unpack)(int type_id);
    // One row of a matrix as float32, rounded as the format's definition says.
    void (*decode_row)(int type_id, const uint8_t* src, int64_t cols, float* out);
};

}  // namespace thermocline
