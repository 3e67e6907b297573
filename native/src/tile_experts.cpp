// Experts on tiles, in two jobs: gate and up to the inner activations, which are written as the right tiles
// that the down product takes; then the down product.
#include <cstring>
#include <vector>

#include "pair_scales.h"
#include "tile_matmul.h"
#include "tile_run.h"

namespace thermocline::tiles {
namespace {

// One expert's matrices, and where its inner activations lie.
struct Expert {
    const ExpertGroup* group;
    TileMatrix gate, up, down;
    int64_t first_tile;  // of tokens
};

// Up to kTokenRange pairs of one expert.
struct Range {
    const Expert* expert;
    int64_t first, count;  // of the pairs
    int64_t tile;          // of tokens
};

// The sums times the weight's scale: themselves, or a copy in `memory`.
const SumTile& scaled(const Weight& weight, const SumTile& sums, SumTile& memory) {
    if (weight.scale == 1.0f) return sums;
    for (int r = 0; r < kStripRows; ++r)
        for (int t = 0; t < kTileTokens; ++t) memory.v[r][t] = weight.scale * sums.v[r][t];
    return memory;
}

struct Layer {
    std::vector<Expert> experts;
    std::vector<Range> ranges;
    int64_t intermediate = 0;
    int64_t depth = 0;      // right tiles of a token tile's inner activations
    RightTile* inner = nullptr;

    Layer(const Compute& compute, const ExpertWork& work)
        : intermediate(work.groups[0].weights.gate.rows), depth(tiles_of(intermediate)) {
        int64_t tile = 0;
        for (int64_t g = 0; g < work.num_groups; ++g) {
            const ExpertGroup& group = work.groups[g];
            experts.push_back({&group, matrix_of(compute, group.weights.gate), matrix_of(compute, group.weights.up),
                               matrix_of(compute, group.weights.down), tile});
            tile += token_tiles_of(group.count);
        }
        for (const Expert& expert : experts)
            for (int64_t first = 0; first < expert.group->count; first += kTokenRange)
                ranges.push_back({&expert, expert.group->first + first,
                                  std::min(kTokenRange, expert.group->count - first),
                                  expert.first_tile + first / kTileTokens});
        thread_local Scratch memory;
        inner = memory.get<RightTile>(tile * depth);
        gate_and_up(compute, work);
    }

    Layer(const Layer&) = delete;
    Layer& operator=(const Layer&) = delete;

    const RightTile* inner_of(const Range& range) const { return inner + range.tile * depth; }

   private:
    void gate_and_up(const Compute& compute, const ExpertWork& work) {
        const int64_t strips = ceil_div(intermediate, kStripRows);
        // Each item packs its tokens, which pays from some eight strip pairs on.
        const int64_t wanted = strips * static_cast<int64_t>(ranges.size()) / (8 * compute.pool.threads());
        const int64_t pieces = ceil_div(strips, std::clamp<int64_t>(wanted, std::min<int64_t>(8, strips), strips));
        const int64_t length = ceil_div(strips, pieces);
        compute.pool.for_each(static_cast<int64_t>(ranges.size()) * pieces, [&](int64_t item) {
            const int64_t start = item % pieces * length;
            gate_and_up_run(*compute.set.tiles, work, ranges[static_cast<size_t>(item / pieces)], start,
                            std::min(start + length, strips));
        });
    }

    void gate_and_up_run(const TileKernels& kernels, const ExpertWork& work, const Range& range, int64_t start,
                         int64_t end) {
        if (start >= end) return;
        thread_local Scratch memory;
        const int64_t cols = work.hidden, x_depth = tiles_of(cols), token_tiles = token_tiles_of(range.count);
        auto* right = memory.get<RightTile>(token_tiles * x_depth);
        for (int64_t t = 0; t < range.count; t += kTileTokens) {
            const int64_t count = std::min<int64_t>(kTileTokens, range.count - t);
            const float* rows[kTileTokens];
            for (int64_t i = 0; i < count; ++i) rows[i] = work.x + work.rows[range.first + t + i] * cols;
            kernels.pack_tokens(rows, static_cast<int>(count), cols, right + t / kTileTokens * x_depth);
        }
        const Expert& expert = *range.expert;
        const auto step_at = [&](int64_t i) {
            const int64_t row = (start + i) * kStripRows;
            return RunStep{{{strip_at(expert.gate, row), strip_at(expert.up, row)}}, right, token_tiles};
        };
        run(kernels, end - start, cols, step_at, [&](int64_t i, const SumTile* sums) {
            const int64_t strip = start + i;
            for (int64_t t = 0; t < token_tiles; ++t, sums += kStrips) {
                RightTile& to = inner[(range.tile + t) * depth + strip / 2];
                SumTile gate, up;
                kernels.pack_inner(scaled(*expert.gate.weight, sums[0], gate), scaled(*expert.up.weight, sums[1], up),
                                   static_cast<int>(strip % 2), to);
                if (strip % 2 == 0 && strip / 2 * kTileColumns + kStripRows >= intermediate)  // no strip after it
                    std::memset(to.pair[kTileColumns / 4], 0, sizeof to / 2);
            }
        });
    }
};

}  // namespace

void expert_outputs(const Compute& compute, const ExpertWork& work, float* out) {
    if (work.num_groups == 0) return;
    const TileKernels& kernels = *compute.set.tiles;
    const PairScales scales(work);
    const Layer layer(compute, work);
    const int64_t pairs = ceil_div(work.hidden, kPanelRows), ranges = static_cast<int64_t>(layer.ranges.size());
    const int64_t length = std::clamp<int64_t>(pairs * ranges / (8 * compute.pool.threads()), 4, 32);
    const int64_t pieces = ceil_div(pairs, length);
    compute.pool.for_each(ranges * pieces, [&](int64_t item) {
        const Range& range = layer.ranges[static_cast<size_t>(item / pieces)];
        const int64_t start = item % pieces * length, end = std::min(start + length, pairs);
        const RightTile* right = layer.inner_of(range);
        const auto step_at = [&](int64_t i) {
            return RunStep{rows_at(range.expert->down, (start + i) * kPanelRows), right, token_tiles_of(range.count)};
        };
        run(kernels, end - start, layer.intermediate, step_at, [&](int64_t i, const SumTile* sums) {
            for (int64_t t = 0; t < range.count; t += kTileTokens)
                for (int s = 0; s < kStrips; ++s, ++sums) {
                    const int64_t row = (start + i) * kPanelRows + s * kStripRows, width = work.hidden - row;
                    const int count = static_cast<int>(std::min<int64_t>(kTileTokens, range.count - t));
                    const float* scale = scales.data() + range.first + t;
                    float* to = out + (range.first + t) * work.hidden + row;
                    if (width >= kStripRows) {
                        kernels.turn(*sums, count, scale, to, work.hidden);
                        continue;
                    }
                    float turned[kTileTokens][kStripRows];
                    kernels.turn(*sums, count, scale, turned[0], kStripRows);
                    for (int n = 0; n < count; ++n)
                        std::copy_n(turned[n], std::max<int64_t>(width, 0), to + n * work.hidden);
                }
        });
    });
}

void expert_sum(const Compute& compute, const ExpertWork& work, const int32_t* pair_of, int64_t slots,
                const float* residual, float* out) {
    if (work.num_groups == 0) return;
    const TileKernels& kernels = *compute.set.tiles;
    const PairScales scales(work);
    const Layer layer(compute, work);
    // Every item reads all inner activations, so that its rows should be many, and keeps all pairs' outputs of
    // its rows in the second-level cache, so that they should be few.
    const int64_t share = work.hidden / (8 * compute.pool.threads()) / kPanelRows * kPanelRows;
    const int64_t block = std::clamp<int64_t>(share, kPanelRows, 128), height = block / kPanelRows;
    compute.pool.for_each(ceil_div(work.hidden, block), [&](int64_t item) {
        thread_local Scratch memory;
        const int64_t row = item * block, width = std::min(block, work.hidden - row);
        float* outputs = memory.get<float>(work.pairs * block);
        const auto step_at = [&](int64_t i) {
            const Range& range = layer.ranges[static_cast<size_t>(i / height)];
            return RunStep{rows_at(range.expert->down, row + i % height * kPanelRows), layer.inner_of(range),
                           token_tiles_of(range.count)};
        };
        const int64_t steps = static_cast<int64_t>(layer.ranges.size()) * height;
        run(kernels, steps, layer.intermediate, step_at, [&](int64_t i, const SumTile* sums) {
            const Range& range = layer.ranges[static_cast<size_t>(i / height)];
            for (int64_t t = 0; t < range.count; t += kTileTokens)
                for (int s = 0; s < kStrips; ++s, ++sums) {
                    const auto tokens = static_cast<int>(std::min<int64_t>(kTileTokens, range.count - t));
                    const int64_t column = i % height * kPanelRows + s * kStripRows;
                    kernels.turn(*sums, tokens, nullptr, outputs + (range.first + t) * block + column, block);
                }
        });
        for (int64_t t = 0; t < work.tokens; ++t)
            compute.set.gemm->add_slots(outputs, block, scales.data(), pair_of + t * slots, slots,
                                        residual + t * work.hidden + row, width, out + t * work.hidden + row);
    });
}

}  // namespace thermocline::tiles
