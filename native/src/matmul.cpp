// Products of token rows with a weight matrix: a few weight rows are decoded into cache at a time and
// used for all tokens.
#include <algorithm>
#include <vector>

#include "thermocline/dot.h"
#include "thermocline/kernels.h"

namespace thermocline {
namespace {

constexpr int64_t kTileRows = 4;     // weight rows and tokens per register tile
constexpr int64_t kDecodedRows = 8;  // weight rows decoded together: 64 KiB at 2048 columns

THERMOCLINE_CLONES void tiles(const float* x, int64_t tokens, const float* w, int64_t rows,
                              int64_t cols, float* out, int64_t out_stride) {
    for (int64_t t = 0; t < tokens;) {
        const bool full_tokens = t + kTileRows <= tokens;
        const float* a = x + t * cols;
        float* o = out + t * out_stride;
        for (int64_t n = 0; n < rows;) {
            const float* b = w + n * cols;
            const bool full_rows = n + kTileRows <= rows;
            if (full_tokens && full_rows) dot_tile<4, 4>(a, cols, b, cols, cols, o + n, out_stride);
            else if (full_tokens) dot_tile<4, 1>(a, cols, b, cols, cols, o + n, out_stride);
            else if (full_rows) dot_tile<1, 4>(a, cols, b, cols, cols, o + n, out_stride);
            else dot_tile<1, 1>(a, cols, b, cols, cols, o + n, out_stride);
            n += full_rows ? kTileRows : 1;
        }
        t += full_tokens ? kTileRows : 1;
    }
}

}  // namespace

void matmul(const Weight& w, const float* x, int64_t tokens, float* out) {
    std::vector<float> decoded(static_cast<size_t>(kDecodedRows * w.cols));
    for (int64_t n = 0; n < w.rows; n += kDecodedRows) {
        const int64_t rows = std::min(kDecodedRows, w.rows - n);
        for (int64_t r = 0; r < rows; ++r)
            decode(w.format, w.row(n + r), decoded.data() + r * w.cols, w.cols);
        tiles(x, tokens, decoded.data(), rows, w.cols, out + n, w.rows);
    }
}

}  // namespace thermocline
