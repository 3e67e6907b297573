// Cuts the gated delta rule into items for the thread pool, and keeps each run's last channels.
#include "thermocline/delta.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace thermocline {
namespace {

// Tokens that one item prepares: some ten thousand channels' worth of work.
constexpr int64_t kItemTokens = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The last channels of each run become its state's; with few tokens, some of the state's stay.
void keep_channels(const DeltaJob& job) {
    const int64_t kept = job.shape.conv_width - 1, channels = job.shape.channels();
    const auto bytes = [&](int64_t rows) { return static_cast<size_t>(rows * channels) * sizeof(float); };
    for (int64_t r = 0; r < job.num_runs; ++r) {
        const StateRun& run = job.runs[r];
        float* state = job.conv_states + run.slot * kept * channels;
        const int64_t fresh = std::min(run.length, kept), stay = kept - fresh;
        std::memmove(state, state + fresh * channels, bytes(stay));
        std::memcpy(state + stay * channels, job.mixed + (run.first + run.length - fresh) * channels, bytes(fresh));
    }
}

}  // namespace

void delta_rule(const Dense& dense, DeltaJob job) {
    const DeltaShape& shape = job.shape;
    int64_t tokens = 0, token_items = 0;
    for (int64_t r = 0; r < job.num_runs; ++r) {
        tokens = std::max(tokens, job.runs[r].first + job.runs[r].length);
        token_items += ceil_div(job.runs[r].length, kItemTokens);
    }
    thread_local Scratch memory;
    job.convolved = memory.get<float>(tokens * (shape.channels() + shape.gates()));
    job.gates = job.convolved + tokens * shape.channels();

    const auto each_piece = [&](auto body) {
        dense.pool.for_each(token_items, [&](int64_t item) {
            for (int64_t r = 0; r < job.num_runs; ++r) {
                const int64_t items = ceil_div(job.runs[r].length, kItemTokens), first = item * kItemTokens;
                if (item < items) return body(job.runs[r], first, std::min(first + kItemTokens, job.runs[r].length));
                item -= items;
            }
        });
    };
    each_piece([&](const StateRun& run, int64_t first, int64_t last) {
        dense.kernels.delta_tokens(job, run, first, last);
    });
    keep_channels(job);
    const int64_t blocks = ceil_div(shape.value_dim, kDeltaColumns), items = shape.value_heads * blocks;
    dense.pool.for_each(job.num_runs * items, [&](int64_t item) {
        thread_local Scratch columns_memory;
        float* scratch = columns_memory.get<float>(shape.key_dim * kDeltaColumns);
        const int64_t head = item % items / blocks, first = item % blocks * kDeltaColumns;
        const int64_t columns = std::min(kDeltaColumns, shape.value_dim - first);
        dense.kernels.delta_columns(job, job.runs[item / items], head, first, columns, scratch);
    });
    each_piece([&](const StateRun& run, int64_t first, int64_t last) {
        dense.kernels.delta_output(job, (run.first + first) * shape.value_heads,
                                   (run.first + last) * shape.value_heads);
    });
}

}  // namespace thermocline
