// Cuts dense jobs into items for the thread pool, and owns their scratch memory.
#include "thermocline/dense.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace thermocline {
namespace {

// Numbers that one item of pointwise work should hold, so that handing it out costs little.
constexpr int64_t kItemNumbers = 1 << 15;
// Query numbers of one attention item: rows of 128 fill half of a 1 MiB cache with all that they need.
constexpr int64_t kItemQueryNumbers = 1 << 14;
constexpr size_t kAlignment = 64;

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

// A thread's memory for its items; it grows to the largest need and stays.
class Scratch {
public:
    float* floats(int64_t count) {
        if (count > size_) {
            const size_t bytes = (static_cast<size_t>(count) * 4 + kAlignment - 1) / kAlignment * kAlignment;
            memory_.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
            size_ = memory_ ? count : 0;
            if (!memory_) throw std::bad_alloc();
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(float* p) const { std::free(p); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t size_ = 0;
};

thread_local Scratch item_scratch;
thread_local Scratch partial_states;

struct Reach {
    int64_t first, last;
};

// Positions that tokens [first, last) of a job see.
Reach reach_of(const AttentionJob& job, int64_t first, int64_t last) {
    const auto [low, high] = std::minmax_element(job.positions + first, job.positions + last);
    return {job.first_seen(*low), static_cast<int64_t>(*high) + 1};
}

constexpr int64_t kNoPartial = -1;

struct Entry {
    AttentionItem item;
    int64_t cost;
    int64_t partial;  // floats from the start of the partial states, or kNoPartial

    AttentionItem placed(float* states) const {
        AttentionItem out = item;
        out.partial = partial == kNoPartial ? nullptr : states + partial;
        return out;
    }
};

// Items of a call, and the merges that follow them.
struct Plan {
    std::vector<Entry> items, merges;
    int64_t partial_floats = 0;
    int64_t scratch_floats = 0;
};

int64_t tokens_per_item(const AttentionJob& job) {
    // Keys and values of a head are made once per item: its tokens share that. More of them would leave the cache.
    if (job.expansion) return 1024;
    // Rows of a latent cache are converted once per item: more queries share that.
    const int64_t numbers = job.cache.latent > 0 ? 4 * kItemQueryNumbers : kItemQueryNumbers;
    return std::max<int64_t>(1, numbers / (job.group() * job.cache.head_dim));
}

// Calls f(item, cost) for every (block of tokens, key head or slice of its query heads) of every job.
template <typename F>
void each_item(const AttentionJob* jobs, int64_t count, F f) {
    for (int64_t j = 0; j < count; ++j) {
        const AttentionJob& job = jobs[j];
        const int64_t step = tokens_per_item(job);
        for (int64_t first = 0; first < job.tokens; first += step) {
            const int64_t num_tokens = std::min(step, job.tokens - first);
            const Reach reach = reach_of(job, first, first + num_tokens);
            const int64_t span = reach.first / kSpanTokens;
            const int64_t num_spans = ceil_div(reach.last, kSpanTokens) - span;
            const int64_t rows = num_tokens * job.group();
            // A row's products, and the conversion of keys and values that all rows share.
            const int64_t made = job.expansion ? job.cache.latent * (job.key_dim() + job.value_dim()) / 2 : 0;
            const int64_t cost = ((rows + 8) * job.key_dim() + made) * (reach.last - reach.first);
            for (int64_t s = 0; s < job.cache.kv_heads * job.slices(); ++s)
                f(AttentionItem{j, s, first, num_tokens, span, num_spans, nullptr}, cost);
        }
    }
}

// An item that would keep one thread busy for too long is cut into its spans.
Plan make_plan(const Dense& dense, const AttentionJob* jobs, int64_t count) {
    int64_t total = 0;
    each_item(jobs, count, [&](const AttentionItem&, int64_t cost) { total += cost; });
    const int threads = dense.pool.threads();
    const int64_t limit = threads == 1 ? total : total / (4 * threads);
    Plan plan;
    each_item(jobs, count, [&](const AttentionItem& item, int64_t cost) {
        const AttentionJob& job = jobs[item.job];
        plan.scratch_floats =
            std::max(plan.scratch_floats, dense.kernels.attention_scratch(job, item.num_tokens));
        if (cost <= limit || item.num_spans == 1) {
            plan.items.push_back({item, cost, kNoPartial});
            return;
        }
        plan.merges.push_back({item, 0, plan.partial_floats});
        const int64_t floats = dense.kernels.attention_state(job, item.num_tokens);
        for (int64_t s = 0; s < item.num_spans; ++s) {
            AttentionItem part = item;
            part.first_span += s;
            part.num_spans = 1;
            plan.items.push_back({part, cost / item.num_spans, plan.partial_floats});
            plan.partial_floats += floats;
        }
    });
    // The longest first, so that no thread is left alone with one at the end.
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const Entry& a, const Entry& b) { return a.cost > b.cost; });
    return plan;
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

int64_t cache_block_bytes(const CacheShape& shape) {
    return shape.kv_heads * shape.block_tokens * cache_row_bytes(shape.type, shape.head_dim);
}

void rms_norm(const Dense& dense, const float* x, const float* gain, float epsilon, int64_t rows,
              int64_t width, float* out) {
    run_rows(dense.pool, rows, width, [&](int64_t first, int64_t last) {
        const int64_t start = first * width;
        dense.kernels.rms_norm(x + start, gain, epsilon, last - first, width, out + start);
    });
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

void attention(const Dense& dense, const AttentionJob* jobs, int64_t count) {
    const Plan plan = make_plan(dense, jobs, count);
    float* const states = partial_states.floats(plan.partial_floats);
    auto attend = [&](int64_t i) {
        const Entry& entry = plan.items[static_cast<size_t>(i)];
        float* const scratch = item_scratch.floats(plan.scratch_floats);
        dense.kernels.attention(jobs[entry.item.job], entry.placed(states), scratch);
    };
    run_items(dense.pool, static_cast<int64_t>(plan.items.size()), attend);
    auto merge = [&](int64_t i) {
        const Entry& entry = plan.merges[static_cast<size_t>(i)];
        dense.kernels.attention_merge(jobs[entry.item.job], entry.placed(states));
    };
    run_items(dense.pool, static_cast<int64_t>(plan.merges.size()), merge);
}

void route(const Dense& dense, RouteJob job) {
    if (const int64_t floats = route_scratch(job)) job.scratch = partial_states.floats(job.tokens * floats);
    run_rows(dense.pool, job.tokens, job.experts * 4,
             [&](int64_t first, int64_t last) { dense.kernels.route(job, first, last); });
}

void gate(const Dense& dense, const GateJob& job) {
    run_rows(dense.pool, job.rows, job.width * 4,
             [&](int64_t first, int64_t last) { dense.kernels.gate(job, first, last); });
}

void add_normed(const Dense& dense, const PostNormJob& job) {
    run_rows(dense.pool, job.rows, job.width * 4, [&](int64_t first, int64_t last) {
        dense.kernels.add_normed(job, first, last, item_scratch.floats(2 * job.width));
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
