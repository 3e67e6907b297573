// Products of one x on tiles. The tokens are packed first, once for all products; then items of rows and
// tokens never share an output element.
#include <vector>

#include "tile_matmul.h"
#include "tile_run.h"

namespace thermocline::tiles {
namespace {

// [token tiles][parts][tiles_of(cols)]
RightTile* pack_all(const Compute& compute, const float* x, int64_t tokens, int64_t cols, int64_t parts) {
    thread_local Scratch memories[kMostParts];
    const int64_t depth = tiles_of(cols), token_tiles = token_tiles_of(tokens);
    auto* packed = memories[parts - 1].get<RightTile>(token_tiles * parts * depth);
    compute.pool.for_each(token_tiles, [&](int64_t tile) {
        const int64_t first = tile * kTileTokens, count = std::min<int64_t>(kTileTokens, tokens - first);
        const float* rows[kTileTokens];
        for (int64_t t = 0; t < count; ++t) rows[t] = x + (first + t) * cols;
        RightTile* to = packed + tile * parts * depth;
        compute.set.tiles->pack_tokens(rows, static_cast<int>(count), cols, static_cast<int>(parts), to);
    });
    return packed;
}

// Sums of one strip for up to 16 tokens, to their places.
void put(const TileKernels& kernels, const SumTile& sums, const Product& product, int64_t row, int64_t first,
         int64_t tokens) {
    const int64_t width = std::min<int64_t>(kStripRows, product.weight.rows - row);
    const int64_t at = first * product.out_stride + row;
    const float scale = product.weight.scale;
    if (width == kStripRows && product.add == nullptr && scale == 1.0f) {
        kernels.turn(sums, static_cast<int>(tokens), nullptr, product.out + at, product.out_stride);
        return;
    }
    float turned[kTileTokens][kStripRows];
    kernels.turn(sums, static_cast<int>(tokens), nullptr, turned[0], kStripRows);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < width; ++i) {
            const int64_t to = at + t * product.out_stride + i;
            const float value = scale * turned[t][i];
            product.out[to] = product.add ? product.add[to] + value : value;
        }
}

struct Part {
    const Product* product;
    TileMatrix matrix;
    int64_t pairs;       // of strips
    int64_t parts;       // right tiles per 16 tokens
    int64_t ranges;      // of tokens
    const RightTile* packed;
    int64_t first_item;
};

}  // namespace

void multiply_all(const Compute& compute, const float* x, int64_t tokens, const Product* products, int count) {
    if (tokens == 0 || count == 0) return;
    const TileKernels& kernels = *compute.set.tiles;
    const int64_t cols = products[0].weight.cols, depth = tiles_of(cols);
    const RightTile* packed[kMostParts] = {};
    int64_t all_pairs = 0;
    for (int p = 0; p < count; ++p) {
        const Weight& weight = products[p].weight;
        const int64_t parts = parts_of(weight);
        all_pairs += ceil_div(weight.rows, kPanelRows) * ceil_div(tokens, range_tokens(parts));
        if (packed[parts - 1] == nullptr) packed[parts - 1] = pack_all(compute, x, tokens, cols, parts);
    }
    // Some eight items per thread; the first panel of a run is decoded while the tiles wait, so not too short.
    const int64_t length = std::clamp<int64_t>(all_pairs / (8 * compute.pool.threads()), 4, 32);
    std::vector<Part> parts;
    int64_t items = 0;
    for (int p = 0; p < count; ++p) {
        const Weight& weight = products[p].weight;
        const int64_t pairs = ceil_div(weight.rows, kPanelRows), each = parts_of(weight);
        const int64_t ranges = ceil_div(tokens, range_tokens(each));
        parts.push_back({&products[p], matrix_of(compute, weight), pairs, each, ranges, packed[each - 1], items});
        items += ceil_div(pairs, length) * ranges;
    }
    compute.pool.for_each(items, [&](int64_t item) {
        size_t index = parts.size() - 1;
        while (parts[index].first_item > item) --index;
        const Part& part = parts[index];
        const int64_t local = item - part.first_item;
        const int64_t start = local / part.ranges * length, end = std::min(start + length, part.pairs);
        const int64_t most = range_tokens(part.parts);
        const int64_t first = local % part.ranges * most, n = std::min(most, tokens - first);
        const RightTile* right = part.packed + first / kTileTokens * part.parts * depth;
        const auto step_at = [&](int64_t i) {
            return RunStep{rows_at(part.matrix, (start + i) * kPanelRows), right, part.parts * token_tiles_of(n)};
        };
        run(kernels, end - start, cols, part.parts, step_at, [&](int64_t i, const SumTile* sums) {
            const int64_t row = (start + i) * kPanelRows;
            for (int64_t t = 0; t < n; t += kTileTokens, sums += kStrips)
                for (int s = 0; s < kStrips && row + s * kStripRows < part.product->weight.rows; ++s)
                    put(kernels, sums[s], *part.product, row + s * kStripRows, first + t,
                        std::min<int64_t>(kTileTokens, n - t));
        });
    });
}

}  // namespace thermocline::tiles
