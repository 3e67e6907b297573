// Products of token rows with a weight matrix: each weight row is decoded once into cache and used
// for all tokens.
#include <vector>

#include "thermocline/dot.h"
#include "thermocline/kernels.h"

namespace thermocline {
namespace {

THERMOCLINE_CLONES void dots(const float* x, int64_t tokens, const float* w, int64_t cols, float* out,
                             int64_t out_stride) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4)
        dot_rows<4>(x + t * cols, cols, w, cols, out + t * out_stride, out_stride);
    for (; t < tokens; ++t) dot_rows<1>(x + t * cols, cols, w, cols, out + t * out_stride, out_stride);
}

}  // namespace

void matmul(const Weight& w, const float* x, int64_t tokens, float* out) {
    std::vector<float> decoded(static_cast<size_t>(w.cols));
    for (int64_t n = 0; n < w.rows; ++n) {
        decode(w.format, w.row(n), decoded.data(), w.cols);
        dots(x, tokens, decoded.data(), w.cols, out + n, w.rows);
    }
}

}  // namespace thermocline
