// What an instruction set with matrix tiles offers to prompts: products in bfloat16 with float32 sums.
//
// Weights are the left operand: 16 rows by 32 decoded columns are a tile as they lie in the file. Tokens
// are the right operand, packed once and used for many rows. A product adds 32 columns to 16 x 16 sums;
// an element of them depends on its row and its token alone, and the steps are added in the order of the
// columns, so that a sum does not depend on what is computed beside it.
#pragma once

#include <cstdint>

#include "thermocline/dense_kernels.h"
#include "thermocline/formats.h"
#include "thermocline/gemm_kernels.h"
#include "thermocline/unpack.h"

namespace thermocline {

constexpr int kTileTokens = 16;   // tokens of a right tile and of a tile of sums
constexpr int kTileColumns = 32;  // columns that one product adds
constexpr int kPanelTiles = kSpan / kTileColumns;
constexpr int kMostParts = 3;     // bfloat16 numbers whose sum is a float32 number
constexpr int kAttentionParts = 2; // those of queries, keys, values and the softmax's weights

inline constexpr int64_t tiles_of(int64_t columns) { return (columns + kTileColumns - 1) / kTileColumns; }

// bfloat16 as raw words.
struct alignas(64) LeftTile {
    uint16_t w[kStripRows][kTileColumns];
};
struct alignas(64) RightTile {
    uint16_t pair[kTileColumns / 2][kTileTokens][2];  // two columns of a token lie together
};
struct alignas(64) SumTile {
    float v[kStripRows][kTileTokens];
};

// A weight matrix of a type that tiles are made from, and how its rows are unpacked.
struct TileMatrix {
    const Weight* weight;
    UnpackInfo info;
    UnpackFn unpack;  // nullptr for BF16
};

// Up to 16 rows of a matrix; the missing ones are taken as zero.
struct TileStrip {
    const TileMatrix* matrix = nullptr;
    int64_t row = 0;
    int rows = 0;
};

// Two strips of equal columns, which are multiplied together.
struct StripPair {
    TileStrip strip[kStrips];
};

// Bytes of a file that will be needed soon.
struct ComingBytes {
    const uint8_t* from = nullptr;
    int64_t bytes = 0;
};

// Decoded weights, those in use and those being decoded. With few tokens, a half: one strip and a span of columns. With
// many, a block: both strips and up to kBlockSpans spans, which fit into the second-level cache.
constexpr int kBlockSpans = 8;
constexpr int kBlockTiles = kBlockSpans * kPanelTiles;
struct TilePanels {
    LeftTile half[2][kPanelTiles];
    LeftTile block[2][kStrips][kBlockTiles];
    int current = 0;
};

// Products of one strip pair with all tokens of a run.
struct TileStep {
    StripPair here;              // its first half or block, by token_tiles, is what the panels hold
    const StripPair* next;       // its first half or block, by next_tiles, is decoded on the way; may be nullptr
    int64_t next_tiles;
    ComingBytes coming[kStrips]; // asked for on the way
    int64_t cols;
    const RightTile* right;      // [token tiles][tiles_of(cols)]
    int64_t token_tiles;
    SumTile* sums;               // [token tiles][kStrips], set
};

struct TileKernels {
    // A thread that multiplies does so between these two.
    void (*begin)();
    void (*end)();
    // Rounds up to 16 tokens' x[cols] into out[parts][tiles_of(cols)]; missing tokens and columns become zero. Each part
    // has what the ones before it left, rounded.
    void (*pack_tokens)(const float* const* x, int tokens, int64_t cols, int parts, RightTile* out);
    // Decodes the first half or block of a run's first strip pair.
    void (*start)(const StripPair& first, int64_t token_tiles, int64_t cols, TilePanels& panels);
    void (*multiply)(const TileStep& step, TilePanels& panels);
    // Half of a right tile, from sums of 16 gate and 16 up rows; without a gate, that is not read. Part p goes to
    // out[p * stride].
    void (*pack_inner)(ExpertActivation activation, SiluLimits limits, const SumTile& gate, const SumTile& up, int half,
                       int parts, RightTile* out, int64_t stride);
    // out[token * stride + row] = scale[token] * sums[row][token], for 16 rows and `tokens` tokens.
    void (*turn)(const SumTile& sums, int tokens, const float* scale, float* out, int64_t stride);
    // It begins and ends by itself.
    AttentionKernels attention;
};

}  // namespace thermocline
