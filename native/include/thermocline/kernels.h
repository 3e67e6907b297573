// CPU kernels over the bytes of a GGUF file. They take pointers and sizes, allocate only scratch,
// write only to caller-owned outputs, and know neither Python nor files.
//
// Numeric contract: every product is a dot product in the fixed order of dot.h, so a token's result
// does not depend on how many rows are computed together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thermocline {

// ggml's tensor type ids, for the types that are decoded here.
enum class Format : int {
    F32 = 0, F16 = 1, Q4_0 = 2, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30,
};

struct FormatInfo {
    int64_t block_elements;
    int64_t block_bytes;
};

// False when the id is none of Format's.
bool format_info(int type_id, FormatInfo& info);

// A weight matrix as it lies in the file: `rows` rows of `cols` elements each, row after row.
struct Weight {
    Format format;
    const uint8_t* data;
    int64_t rows;
    int64_t cols;
    int64_t row_bytes;

    const uint8_t* row(int64_t r) const { return data + r * row_bytes; }
};

// Decodes `count` elements (a multiple of the block) that start at `src` to float32.
void decode(Format format, const uint8_t* src, float* dst, int64_t count);

// out[t, n] = sum_k x[t, k] * w[n, k]     x: [tokens, cols], out: [tokens, rows], all row-major.
void matmul(const Weight& w, const float* x, int64_t tokens, float* out);

struct ExpertWeights {
    Weight gate;  // [intermediate, hidden]
    Weight up;    // [intermediate, hidden]
    Weight down;  // [hidden, intermediate]
};

// out[i] = scale[i] * down(silu(gate(x[rows[i]])) * up(x[rows[i]]))     out: [count, hidden]
void expert_ffn(const ExpertWeights& w, const float* x, const int32_t* rows, const float* scale,
                int64_t count, float* out);

// Advises the pages of bytes [start, end) of a mapping as needed soon, at most `piece_bytes` per call:
// the kernel cuts a longer call short without saying so. Returns the bytes advised, counted from the
// first page's start, or -errno.
int64_t will_need(const uint8_t* base, int64_t start, int64_t end, int64_t piece_bytes);

}  // namespace thermocline
