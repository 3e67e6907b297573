// What products and experts on tiles share: how matrices become strips, and a run of them on one thread.
#pragma once

#include <algorithm>

#include "scratch.h"
#include "thermocline/compute.h"
#include "thermocline/tile_kernels.h"

namespace thermocline::tiles {

// Tokens that share one decoding of a panel. Their packed activations stay in the second-level cache, and the
// tiles of so many take longer than the vector unit needs to decode.
constexpr int64_t kTokenRange = 128;
constexpr int64_t kRangeTiles = kTokenRange / kTileTokens;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t token_tiles_of(int64_t tokens) { return ceil_div(tokens, kTileTokens); }

inline TileMatrix matrix_of(const Compute& compute, const Weight& weight) {
    TileMatrix matrix{&weight, {}, compute.set.gemm->find_unpack(weight.type_id)};
    unpack_info(weight.type_id, matrix.info);
    return matrix;
}

// Rows past the end of the matrix are missing.
inline TileStrip strip_at(const TileMatrix& matrix, int64_t row) {
    return {&matrix, row, static_cast<int>(std::clamp<int64_t>(matrix.weight->rows - row, 0, kStripRows))};
}

inline StripPair rows_at(const TileMatrix& matrix, int64_t row) {
    return {{strip_at(matrix, row), strip_at(matrix, row + kStripRows)}};
}

// How many right tiles hold 16 tokens: for weights that are bfloat16 themselves, further ones have what the first one's
// rounding left, so that the sums are those of float32 numbers.
inline int64_t parts_of(const Weight& weight) { return weight.type_id == kBF16 ? kMostParts : 1; }
inline int64_t range_tokens(int64_t parts) { return kRangeTiles / parts * kTileTokens; }

// A strip pair and the tokens that it is multiplied with.
struct RunStep {
    StripPair pair;
    const RightTile* right;
    int64_t token_tiles;  // at most kRangeTiles, all parts counted
};

// The sums of all parts: what `sums` holds of the tiles from parts * t on becomes that of token tile t, the smallest
// parts added first.
inline void join_parts(SumTile* sums, int64_t token_tiles, int64_t parts) {
    for (int64_t t = 0; t < token_tiles / parts; ++t)
        for (int s = 0; s < kStrips; ++s) {
            const SumTile* from = sums + parts * t * kStrips + s;
            SumTile& to = sums[t * kStrips + s];
            for (int r = 0; r < kStripRows; ++r)
                for (int i = 0; i < kTileTokens; ++i) {
                    float sum = from[(parts - 1) * kStrips].v[r][i];
                    for (int64_t p = parts - 2; p >= 0; --p) sum = from[p * kStrips].v[r][i] + sum;
                    to.v[r][i] = sum;
                }
        }
}

// Multiplies step_at(0), step_at(1), ... and calls take(index, sums) after each, the parts joined. Decoding is one step
// ahead, the bytes of the file are asked for two steps ahead.
template <typename StepAt, typename Take>
void run(const TileKernels& kernels, int64_t count, int64_t cols, int64_t parts, const StepAt& step_at,
         const Take& take) {
    thread_local Scratch panel_memory, sum_memory;
    auto& panels = *panel_memory.get<TilePanels>(1);
    panels.current = 0;
    auto* sums = sum_memory.get<SumTile>(kRangeTiles * kStrips);
    struct Scope {
        const TileKernels& kernels;
        explicit Scope(const TileKernels& k) : kernels(k) { kernels.begin(); }
        ~Scope() { kernels.end(); }
    } const scope(kernels);
    RunStep here = step_at(0);
    kernels.start(here.pair, here.token_tiles, cols, panels);
    for (int64_t i = 0; i < count; ++i) {
        const RunStep next = i + 1 < count ? step_at(i + 1) : here;
        TileStep step{here.pair, i + 1 < count ? &next.pair : nullptr, next.token_tiles, {}, cols, here.right,
                      here.token_tiles, sums};
        if (i + 2 < count) {
            const StripPair later = step_at(i + 2).pair;
            for (int s = 0; s < kStrips; ++s)
                if (const TileStrip& strip = later.strip[s]; strip.rows > 0) {
                    const Weight& weight = *strip.matrix->weight;
                    step.coming[s] = {weight.row(strip.row), strip.rows * weight.row_bytes};
                }
        }
        kernels.multiply(step, panels);
        if (parts > 1) join_parts(sums, here.token_tiles, parts);
        take(i, sums);
        here = next;
    }
}

}  // namespace thermocline::tiles
