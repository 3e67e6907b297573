// Cuts short convolutions, Mamba2 and the first Mamba into items for the thread pool, and keeps each run's last channels.
#include "thermocline/recurrent.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace thermocline {
namespace {

// Tokens that one item takes: some ten thousand channels' worth of work.
constexpr int64_t kItemTokens = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(run, first token, last token) for pieces of all runs, on the pool.
template <typename Job, typename Body>
void each_piece(const Dense& dense, const Job& job, Body body) {
    int64_t total = 0;
    for (int64_t r = 0; r < job.num_runs; ++r) total += ceil_div(job.runs[r].length, kItemTokens);
    dense.pool.for_each(total, [&](int64_t item) {
        for (int64_t r = 0; r < job.num_runs; ++r) {
            const int64_t items = ceil_div(job.runs[r].length, kItemTokens), first = item * kItemTokens;
            if (item < items) return body(job.runs[r], first, std::min(first + kItemTokens, job.runs[r].length));
            item -= items;
        }
    });
}

// write(token of the run, channels) gives what the state keeps of each run's last tokens; with few tokens, some of
// the state's stay.
template <typename Job, typename Write>
void keep_channels(const Job& job, int64_t kept, int64_t channels, Write write) {
    for (int64_t r = 0; r < job.num_runs; ++r) {
        const StateRun& run = job.runs[r];
        float* state = job.conv_states + run.slot * kept * channels;
        const int64_t fresh = std::min(run.length, kept), stay = kept - fresh;
        std::memmove(state, state + fresh * channels, static_cast<size_t>(stay * channels) * sizeof(float));
        for (int64_t n = 0; n < fresh; ++n)
            write(run.first + run.length - fresh + n, state + (stay + n) * channels);
    }
}

}  // namespace

void short_convolution(const Dense& dense, const ShortConvJob& job) {
    each_piece(dense, job, [&](const StateRun& run, int64_t first, int64_t last) {
        dense.kernels.short_conv(job, run, first, last);
    });
    keep_channels(job, job.width - 1, job.channels, [&](int64_t token, float* kept) {
        const float* b = job.rows + token * 3 * job.channels;
        const float* x = b + 2 * job.channels;
        for (int64_t i = 0; i < job.channels; ++i) kept[i] = b[i] * x[i];
    });
}

void mamba(const Dense& dense, MambaJob job) {
    const MambaShape& shape = job.shape;
    const int64_t channels = shape.channels();
    int64_t tokens = 0;
    for (int64_t r = 0; r < job.num_runs; ++r) tokens = std::max(tokens, job.runs[r].first + job.runs[r].length);
    thread_local Scratch memory;
    job.convolved = memory.get<float>(tokens * (channels + 2 * shape.heads));
    job.gates = job.convolved + tokens * channels;

    each_piece(dense, job, [&](const StateRun& run, int64_t first, int64_t last) {
        dense.kernels.mamba_tokens(job, run, first, last);
    });
    keep_channels(job, shape.conv_width - 1, channels, [&](int64_t token, float* kept) {
        const float* from = job.rows + token * shape.row() + shape.width();
        std::memcpy(kept, from, static_cast<size_t>(channels) * sizeof(float));
    });
    const int64_t blocks = ceil_div(shape.head_dim, kMambaColumns), items = shape.heads * blocks;
    dense.pool.for_each(job.num_runs * items, [&](int64_t item) {
        thread_local Scratch columns_memory;
        float* scratch = columns_memory.get<float>(shape.state_dim * kMambaColumns);
        const int64_t head = item % items / blocks, first = item % blocks * kMambaColumns;
        const int64_t columns = std::min(kMambaColumns, shape.head_dim - first);
        dense.kernels.mamba_columns(job, job.runs[item / items], head, first, columns, scratch);
    });
    each_piece(dense, job, [&](const StateRun& run, int64_t first, int64_t last) {
        dense.kernels.mamba_output(job, run.first + first, run.first + last);
    });
}

void selective_convolution(const Dense& dense, const SelectiveJob& job) {
    const SelectiveShape& shape = job.shape;
    each_piece(dense, job, [&](const StateRun& run, int64_t first, int64_t last) {
        dense.kernels.selective_tokens(job, run, first, last);
    });
    keep_channels(job, shape.conv_width - 1, shape.width, [&](int64_t token, float* kept) {
        std::memcpy(kept, job.rows + token * shape.row(), static_cast<size_t>(shape.width) * sizeof(float));
    });
}

void selective_scan(const Dense& dense, const SelectiveJob& job) {
    const SelectiveShape& shape = job.shape;
    const int64_t items = ceil_div(shape.width, kMambaColumns);
    dense.pool.for_each(job.num_runs * items, [&](int64_t item) {
        thread_local Scratch memory;
        float* scratch = memory.get<float>(2 * shape.state_dim * kMambaColumns);
        const int64_t first = item % items * kMambaColumns, columns = std::min(kMambaColumns, shape.width - first);
        dense.kernels.selective_columns(job, job.runs[item / items], first, columns, scratch);
    });
}

}  // namespace thermocline
