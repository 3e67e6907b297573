// Cuts dense jobs into items for the thread pool; attention has a file of its own.
#include "thermocline/dense.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "scratch.h"

namespace thermocline {
namespace {

// Numbers that one item of pointwise work should hold, so that handing it out costs little.
constexpr int64_t kItemNumbers = 1 << 15;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename F>
void run_items(ThreadPool& pool, int64_t items, F& body) {
    pool.run(items, [](void* context, int64_t item) { (*static_cast<F*>(context))(item); }, &body);
}

// Runs body(first, last) over pieces of [0, rows).
template <typename F>
void run_rows(ThreadPool& pool, int64_t rows, int64_t numbers_per_row, F body) {
    const int64_t wanted = std::max<int64_t>(1, kItemNumbers / std::max<int64_t>(1, numbers_per_row));
    const int64_t piece = std::min(wanted, ceil_div(rows, pool.threads()));
    auto item = [&](int64_t i) { body(i * piece, std::min(rows, (i + 1) * piece)); };
    if (rows > 0) run_items(pool, ceil_div(rows, piece), item);
}

// In an order of additions that no instruction set changes.
double mean_of(const float* x, int64_t width) {
    constexpr int64_t kSums = 8;
    double sums[kSums] = {};
    const int64_t whole = width - width % kSums;
    for (int64_t i = 0; i < whole; i += kSums)
        for (int64_t n = 0; n < kSums; ++n) sums[n] += static_cast<double>(x[i + n]);
    for (int64_t i = whole; i < width; ++i) sums[i - whole] += static_cast<double>(x[i]);
    double total = 0.0;
    for (const double sum : sums) total += sum;
    return total / static_cast<double>(width);
}

}  // namespace

bool cache_type(int type_id, CacheType& type) {
    type = static_cast<CacheType>(type_id);
    switch (type) {
        case CacheType::F32:
        case CacheType::F16:
        case CacheType::BF16:
        case CacheType::Q8_0: return true;
    }
    return false;
}

int64_t cache_row_bytes(CacheType type, int64_t head_dim) {
    switch (type) {
        case CacheType::F32: return head_dim * 4;
        case CacheType::F16:
        case CacheType::BF16: return head_dim * 2;
        case CacheType::Q8_0: break;
    }
    return head_dim / 32 * 34;
}

void rms_norm(const Dense& dense, const float* x, const float* gain, float epsilon, int64_t rows,
              int64_t width, float* out) {
    run_rows(dense.pool, rows, width, [&](int64_t first, int64_t last) {
        const int64_t start = first * width;
        dense.kernels.rms_norm(x + start, gain, epsilon, last - first, width, out + start);
    });
}

void layer_norm(const Dense& dense, const float* x, const float* gain, const float* bias, float epsilon, int64_t rows,
                int64_t width, float* out) {
    run_rows(dense.pool, rows, width, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const float* from = x + r * width;
            float* to = out + r * width;
            const double mean = mean_of(from, width);
            for (int64_t i = 0; i < width; ++i) to[i] = static_cast<float>(static_cast<double>(from[i]) - mean);
        }
        const int64_t start = first * width;
        dense.kernels.rms_norm(out + start, gain, epsilon, last - first, width, out + start);
        if (bias == nullptr) return;
        for (int64_t r = first; r < last; ++r)
            for (int64_t i = 0; i < width; ++i) out[r * width + i] += bias[i];
    });
}

void norm_rows(const Dense& dense, const float* x, const float* gain, const Centering& centering, float epsilon,
               int64_t rows, int64_t width, float* out) {
    if (centering.centers) layer_norm(dense, x, gain, centering.bias, epsilon, rows, width, out);
    else rms_norm(dense, x, gain, epsilon, rows, width, out);
}

void rope_table(const Dense& dense, const int32_t* positions, int64_t tokens, const double* frequencies,
                int64_t count, double magnitude, float* cosines, float* sines) {
    // A sine in double takes about as long as thirty numbers of other work.
    run_rows(dense.pool, tokens, count * 64, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t)
            for (int64_t i = 0; i < count; ++i) {
                const double angle = static_cast<double>(positions[t]) * frequencies[i];
                cosines[t * count + i] = static_cast<float>(std::cos(angle) * magnitude);
                sines[t * count + i] = static_cast<float>(std::sin(angle) * magnitude);
            }
    });
}

void prepare_heads(const Dense& dense, const HeadsJob& job) {
    const int64_t numbers = (job.heads + 3 * job.cache.kv_heads) * job.cache.head_dim;
    run_rows(dense.pool, job.tokens, numbers,
             [&](int64_t first, int64_t last) { dense.kernels.heads(job, first, last); });
}

void prepare_latent(const Dense& dense, const LatentJob& job) {
    const int64_t numbers = (2 * job.heads + 3) * job.cache.head_dim;
    run_rows(dense.pool, job.tokens, numbers,
             [&](int64_t first, int64_t last) { dense.kernels.latent(job, first, last); });
}

void index_scores(const Dense& dense, const IndexJob& job) {
    const int64_t numbers = kIndexTokens * job.tokens * job.heads * job.dim;
    run_rows(dense.pool, ceil_div(job.count, kIndexTokens), numbers, [&](int64_t first, int64_t last) {
        thread_local Scratch scratch;
        float* const rows = scratch.get<float>(kIndexTokens * job.dim);
        for (int64_t i = first; i < last; ++i) {
            const int64_t start = i * kIndexTokens;
            dense.kernels.index_scores(job, start, std::min(kIndexTokens, job.count - start), rows);
        }
    });
}

void route(const Dense& dense, RouteJob job) {
    thread_local Scratch scratch;
    if (const int64_t floats = route_scratch(job)) job.scratch = scratch.get<float>(job.tokens * floats);
    run_rows(dense.pool, job.tokens, job.experts * 4,
             [&](int64_t first, int64_t last) { dense.kernels.route(job, first, last); });
}

void gate(const Dense& dense, const GateJob& job) {
    run_rows(dense.pool, job.rows, job.width * 4,
             [&](int64_t first, int64_t last) { dense.kernels.gate(job, first, last); });
}

void add_normed(const Dense& dense, const PostNormJob& job) {
    run_rows(dense.pool, job.rows, job.width * 4, [&](int64_t first, int64_t last) {
        thread_local Scratch scratch;
        dense.kernels.add_normed(job, first, last, scratch.get<float>(2 * job.width));
    });
}

void softcap(const Dense& dense, const float* x, float cap, int64_t rows, int64_t width, float* out) {
    // A row may be a whole vocabulary wide, so pieces are not rows.
    constexpr int64_t kPiece = 1 << 12;
    const int64_t numbers = rows * width;
    run_rows(dense.pool, ceil_div(numbers, kPiece), kPiece * 8, [&](int64_t first, int64_t last) {
        const int64_t start = first * kPiece, end = std::min(numbers, last * kPiece);
        dense.kernels.softcap(x + start, end - start, cap, out + start);
    });
}

void take_streams(const Dense& dense, const StreamsJob& job) {
    // A token's columns stay on one thread: 4 streams of 4,096 take 2 us, no longer than handing out would.
    run_rows(dense.pool, job.tokens, 2 * job.streams * job.width,
             [&](int64_t first, int64_t last) { dense.kernels.take_streams(job, first, last); });
}

void pool_rows(const Dense& dense, const PoolJob& job) {
    // An entry of few rows takes about a microsecond; long ones are cut into columns.
    constexpr int64_t kColumns = 64;
    const int64_t numbers = 4 * job.count * kColumns, pieces = ceil_div(job.width, kColumns);
    const auto pool = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t column = i % pieces * kColumns;
            dense.kernels.pool_rows(job, i / pieces, column, std::min(job.width, column + kColumns));
        }
    };
    if (job.entries * pieces * numbers <= kItemNumbers) pool(0, job.entries * pieces);
    else run_rows(dense.pool, job.entries * pieces, numbers, pool);
}

bool combine(const Dense& dense, const float* residual, const Contributions* parts, int64_t count,
             int64_t tokens, int64_t slots, int64_t width, float* out) {
    std::vector<const float*> sources(static_cast<size_t>(tokens * slots), nullptr);
    int64_t found = 0;
    for (int64_t p = 0; p < count; ++p)
        for (int64_t i = 0; i < parts[p].count; ++i) {
            const float*& source =
                sources[static_cast<size_t>(parts[p].rows[i] * slots + parts[p].slots[i])];
            if (source != nullptr) return false;
            source = parts[p].values + i * width;
            ++found;
        }
    if (found != tokens * slots) return false;
    const CombineJob job{residual, sources.data(), tokens, slots, width, out};
    run_rows(dense.pool, tokens, (slots + 2) * width,
             [&](int64_t first, int64_t last) { dense.kernels.combine(job, first, last); });
    return true;
}

}  // namespace thermocline
