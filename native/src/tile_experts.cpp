// Experts on tiles, in two jobs: gate and up to the inner activations, which are written as the right tiles
// that the down product takes; then the down product.
#include <cstring>
#include <vector>

#include "missing_pages.h"
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

// Some pairs of one expert, as many as are multiplied together.
struct Range {
    const Expert* expert;
    int64_t first, count;  // of the pairs
    int64_t tile;          // of tokens
};

// The sums of rows from `row` on times the weight's scale, plus the bias: themselves, or a copy in `memory`.
const SumTile& finished(const Weight& weight, const float* bias, int64_t row, const SumTile& sums, SumTile& memory) {
    if (weight.scale == 1.0f && bias == nullptr) return sums;
    for (int r = 0; r < kStripRows; ++r) {
        const float added = bias != nullptr && row + r < weight.rows ? bias[row + r] : 0.0f;
        for (int t = 0; t < kTileTokens; ++t) memory.v[r][t] = weight.scale * sums.v[r][t] + added;
    }
    return memory;
}

void ask_for_rows(const Weight& weight, int64_t from, int64_t to) {
    ask_for(weight.row(from), (std::min(to, weight.rows) - from) * weight.row_bytes);
}

// The same of a down matrix, whose scale its pairs have.
const SumTile& with_bias(const ExpertWeights& weights, int64_t row, const SumTile& sums, SumTile& memory) {
    if (weights.down_bias == nullptr) return sums;
    Weight unscaled = weights.down;
    unscaled.scale = 1.0f;
    return finished(unscaled, weights.down_bias, row, sums, memory);
}

struct Layer {
    std::vector<Expert> experts;
    std::vector<Range> ranges;
    int64_t intermediate = 0;
    int64_t depth = 0;       // right tiles of one part of a token tile's inner activations
    int64_t x_parts = 1;     // of x
    int64_t parts = 1;       // of the inner activations
    RightTile* inner = nullptr;

    Layer(const Compute& compute, const ExpertWork& work)
        : intermediate(work.groups[0].weights.up.rows), depth(tiles_of(intermediate)) {
        int64_t tile = 0;
        for (int64_t g = 0; g < work.num_groups; ++g) {
            const ExpertWeights& w = work.groups[g].weights;
            x_parts = std::max(x_parts, parts_of(w.up));
            if (has_gate(w.activation)) x_parts = std::max(x_parts, parts_of(w.gate));
            parts = std::max(parts, parts_of(w.down));
        }
        const int64_t most = range_tokens(std::max(x_parts, parts));
        for (int64_t g = 0; g < work.num_groups; ++g) {
            const ExpertGroup& group = work.groups[g];
            const ExpertWeights& w = group.weights;
            const TileMatrix up = matrix_of(compute, w.up);
            experts.push_back({&group, has_gate(w.activation) ? matrix_of(compute, w.gate) : up, up,
                               matrix_of(compute, w.down), tile});
            tile += token_tiles_of(group.count);
        }
        for (const Expert& expert : experts)
            for (int64_t first = 0; first < expert.group->count; first += most)
                ranges.push_back({&expert, expert.group->first + first, std::min(most, expert.group->count - first),
                                  expert.first_tile + first / kTileTokens});
        thread_local Scratch memory;
        inner = memory.get<RightTile>(tile * parts * depth);
        gate_and_up(compute, work);
    }

    Layer(const Layer&) = delete;
    Layer& operator=(const Layer&) = delete;

    const RightTile* inner_of(const Range& range) const { return inner + range.tile * parts * depth; }

    // Of its inner activations.
    int64_t right_tiles_of(const Range& range) const { return parts * token_tiles_of(range.count); }

   private:
    void gate_and_up(const Compute& compute, const ExpertWork& work) {
        const bool gated = has_gate(work.groups[0].weights.activation);
        const int64_t strips = ceil_div(intermediate, gated ? kStripRows : kPanelRows);
        // Each item packs its tokens, which pays from some eight strip pairs on.
        const int64_t wanted = strips * static_cast<int64_t>(ranges.size()) / (8 * compute.pool.threads());
        const int64_t pieces = ceil_div(strips, std::clamp<int64_t>(wanted, std::min<int64_t>(8, strips), strips));
        const int64_t length = ceil_div(strips, pieces);
        compute.pool.for_each(static_cast<int64_t>(ranges.size()) * pieces, [&](int64_t item) {
            const int64_t start = item % pieces * length;
            const int64_t end = std::min(start + length, strips);
            if (start >= end) return;
            const Range& range = ranges[static_cast<size_t>(item / pieces)];
            if (range.expert->group->may_be_missing) {
                const ExpertWeights& w = range.expert->group->weights;
                const int64_t height = gated ? kStripRows : kPanelRows;
                if (gated) ask_for_rows(w.gate, start * height, end * height);
                ask_for_rows(w.up, start * height, end * height);
            }
            const RightTile* right = packed_tokens(*compute.set.tiles, work, range, x_parts);
            if (gated)
                gate_and_up_run(*compute.set.tiles, work.hidden, range, right, start, end);
            else
                up_run(*compute.set.tiles, work.hidden, range, right, start, end);
        });
    }

    static const RightTile* packed_tokens(const TileKernels& kernels, const ExpertWork& work, const Range& range,
                                          int64_t parts) {
        thread_local Scratch memory;
        const int64_t cols = work.hidden, x_depth = tiles_of(cols), token_tiles = token_tiles_of(range.count);
        auto* right = memory.get<RightTile>(token_tiles * parts * x_depth);
        for (int64_t t = 0; t < range.count; t += kTileTokens) {
            const int64_t count = std::min<int64_t>(kTileTokens, range.count - t);
            const float* rows[kTileTokens];
            for (int64_t i = 0; i < count; ++i) rows[i] = work.x + work.rows[range.first + t + i] * cols;
            RightTile* to = right + t / kTileTokens * parts * x_depth;
            kernels.pack_tokens(rows, static_cast<int>(count), cols, static_cast<int>(parts), to);
        }
        return right;
    }

    // Steps of 16 rows of gate and as many of up.
    void gate_and_up_run(const TileKernels& kernels, int64_t cols, const Range& range, const RightTile* right,
                         int64_t start, int64_t end) {
        const Expert& expert = *range.expert;
        const ExpertWeights& w = expert.group->weights;
        const int64_t token_tiles = token_tiles_of(range.count);
        const auto step_at = [&](int64_t i) {
            const int64_t row = (start + i) * kStripRows;
            return RunStep{{{strip_at(expert.gate, row), strip_at(expert.up, row)}}, right, x_parts * token_tiles};
        };
        run(kernels, end - start, cols, x_parts, step_at, [&](int64_t i, const SumTile* sums) {
            const int64_t strip = start + i;
            for (int64_t t = 0; t < token_tiles; ++t, sums += kStrips) {
                RightTile& to = inner[(range.tile + t) * parts * depth + strip / 2];
                SumTile gate, up;
                const int64_t row = strip * kStripRows;
                kernels.pack_inner(w.activation, w.limits, finished(w.gate, w.gate_bias, row, sums[0], gate),
                                   finished(w.up, w.up_bias, row, sums[1], up), static_cast<int>(strip % 2), static_cast<int>(parts),
                                   &to, depth);
                if (strip % 2 != 0 || strip / 2 * kTileColumns + kStripRows < intermediate) continue;
                for (int64_t p = 0; p < parts; ++p)  // no strip after it
                    std::memset((&to + p * depth)->pair[kTileColumns / 4], 0, sizeof to / 2);
            }
        });
    }

    // Steps of 32 rows of up, without a gate.
    void up_run(const TileKernels& kernels, int64_t cols, const Range& range, const RightTile* right, int64_t start,
                int64_t end) {
        static_assert(kPanelRows == kTileColumns);
        const Expert& expert = *range.expert;
        const ExpertWeights& w = expert.group->weights;
        const int64_t token_tiles = token_tiles_of(range.count);
        const auto step_at = [&](int64_t i) {
            return RunStep{rows_at(expert.up, (start + i) * kPanelRows), right, x_parts * token_tiles};
        };
        run(kernels, end - start, cols, x_parts, step_at, [&](int64_t i, const SumTile* sums) {
            for (int64_t t = 0; t < token_tiles; ++t)
                for (int s = 0; s < kStrips; ++s, ++sums) {
                    SumTile memory;
                    const int64_t row = (start + i) * kPanelRows + s * kStripRows;
                    const SumTile& up = finished(w.up, w.up_bias, row, *sums, memory);
                    RightTile& to = inner[(range.tile + t) * parts * depth + start + i];
                    kernels.pack_inner(w.activation, w.limits, up, up, s, static_cast<int>(parts), &to, depth);
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
        if (range.expert->group->may_be_missing)
            ask_for_rows(range.expert->group->weights.down, start * kPanelRows, end * kPanelRows);
        const auto step_at = [&](int64_t i) {
            return RunStep{rows_at(range.expert->down, (start + i) * kPanelRows), right, layer.right_tiles_of(range)};
        };
        run(kernels, end - start, layer.intermediate, layer.parts, step_at, [&](int64_t i, const SumTile* sums) {
            for (int64_t t = 0; t < range.count; t += kTileTokens)
                for (int s = 0; s < kStrips; ++s, ++sums) {
                    const int64_t row = (start + i) * kPanelRows + s * kStripRows, width = work.hidden - row;
                    const int count = static_cast<int>(std::min<int64_t>(kTileTokens, range.count - t));
                    const float* scale = scales.data() + range.first + t;
                    float* to = out + (range.first + t) * work.hidden + row;
                    SumTile memory;
                    const SumTile& down = with_bias(range.expert->group->weights, row, *sums, memory);
                    if (width >= kStripRows) {
                        kernels.turn(down, count, scale, to, work.hidden);
                        continue;
                    }
                    float turned[kTileTokens][kStripRows];
                    kernels.turn(down, count, scale, turned[0], kStripRows);
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
    // Every item reads all inner activations, so that its rows should be many; it keeps all pairs' outputs of its rows,
    // 8 MiB at most where that leaves 128 rows.
    const int64_t kept = (int64_t{8} << 20) / static_cast<int64_t>(sizeof(float)) / work.pairs;
    const int64_t most = std::clamp<int64_t>(kept / kPanelRows * kPanelRows, 128, 512);
    const int64_t share = work.hidden / (2 * compute.pool.threads()) / kPanelRows * kPanelRows;
    const int64_t block = std::clamp<int64_t>(share, kPanelRows, most), height = block / kPanelRows;
    compute.pool.for_each(ceil_div(work.hidden, block), [&](int64_t item) {
        thread_local Scratch memory;
        const int64_t row = item * block, width = std::min(block, work.hidden - row);
        float* outputs = memory.get<float>(work.pairs * block);
        for (const Expert& expert : layer.experts)
            if (expert.group->may_be_missing) ask_for_rows(expert.group->weights.down, row, row + width);
        const auto step_at = [&](int64_t i) {
            const Range& range = layer.ranges[static_cast<size_t>(i / height)];
            return RunStep{rows_at(range.expert->down, row + i % height * kPanelRows), layer.inner_of(range),
                           layer.right_tiles_of(range)};
        };
        const int64_t steps = static_cast<int64_t>(layer.ranges.size()) * height;
        run(kernels, steps, layer.intermediate, layer.parts, step_at, [&](int64_t i, const SumTile* sums) {
            const Range& range = layer.ranges[static_cast<size_t>(i / height)];
            for (int64_t t = 0; t < range.count; t += kTileTokens)
                for (int s = 0; s < kStrips; ++s, ++sums) {
                    const auto tokens = static_cast<int>(std::min<int64_t>(kTileTokens, range.count - t));
                    const int64_t column = i % height * kPanelRows + s * kStripRows;
                    SumTile memory;
                    const SumTile& down = with_bias(range.expert->group->weights, row + column, *sums, memory);
                    kernels.turn(down, tokens, nullptr, outputs + (range.first + t) * block + column, block);
                }
        });
        for (int64_t t = 0; t < work.tokens; ++t)
            compute.set.gemm->add_slots(outputs, block, scales.data(), pair_of + t * slots, slots,
                                        residual + t * work.hidden + row, width, out + t * work.hidden + row);
    });
}

}  // namespace thermocline::tiles
