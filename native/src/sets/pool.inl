// Rows that are pooled into one, number by number, by a softmax of their gates.
#pragma once

#include "pointwise.inl"

namespace thermocline::THERMOCLINE_SET {
namespace {

// Vectors of columns that are pooled side by side: a row's next to each other are read from memory at once.
constexpr int kPooledVectors = 4;

// Columns of one entry of `job`, as many vectors; `lanes` of the last one.
template <int Vectors>
inline void pool_columns(const PoolJob& job, int64_t entry, int64_t column, int64_t lanes) {
    const int64_t width = job.width, first = entry * job.count * width + column;
    const float* const places = job.places + column;
    const auto gate = [&](int64_t r, int v) {
        const int64_t at = r * width + v * kWidth, n = v == Vectors - 1 ? lanes : kWidth;
        return add(load_lanes(job.gates + first + at, n), load_lanes(places + at, n));
    };
    Vec top[Vectors], sum[Vectors], total[Vectors];
    for (int v = 0; v < Vectors; ++v) top[v] = gate(0, v);
    for (int64_t r = 1; r < job.count; ++r)
        for (int v = 0; v < Vectors; ++v) top[v] = max(top[v], gate(r, v));
    for (int v = 0; v < Vectors; ++v) sum[v] = total[v] = zero();
    for (int64_t r = 0; r < job.count; ++r)
        for (int v = 0; v < Vectors; ++v) {
            const Vec weight = exp(sub(gate(r, v), top[v]));
            const int64_t n = v == Vectors - 1 ? lanes : kWidth;
            sum[v] = add(sum[v], weight);
            total[v] = fma(weight, load_lanes(job.rows + first + r * width + v * kWidth, n), total[v]);
        }
    for (int v = 0; v < Vectors; ++v)
        store_lanes(job.out + entry * width + column + v * kWidth, div(total[v], sum[v]),
                    v == Vectors - 1 ? lanes : kWidth);
}

void pool_rows(const PoolJob& job, int64_t entry, int64_t first_column, int64_t last_column) {
    int64_t column = first_column;
    for (; column + kPooledVectors * kWidth <= last_column; column += kPooledVectors * kWidth)
        pool_columns<kPooledVectors>(job, entry, column, kWidth);
    for (; column < last_column; column += kWidth)
        pool_columns<1>(job, entry, column, min_of(kWidth, last_column - column));
}

}  // namespace
}  // namespace thermocline::THERMOCLINE_SET
