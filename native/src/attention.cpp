// Cuts the attention of some sequences into items for the thread pool, and owns their memory.
#include <algorithm>
#include <vector>

#include "scratch.h"
#include "thermocline/dense.h"

namespace thermocline {
namespace {

// Query numbers of an item over a latent cache, whose rows are converted once per item: more queries share that.
constexpr int64_t kLatentNumbers = 1 << 16;
// Items that keep a thread busy to the end, and the most heads of an item where sequences alone are as many.
constexpr int64_t kItemsPerThread = 4, kManyHeads = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

int64_t tokens_per_item(const AttentionKernels& kernels, const AttentionJob& job, int threads) {
    // Keys and values of a head are made once per item: its tokens share that. More of them would leave the cache.
    if (job.expansion) return 1024;
    const int64_t numbers = job.cache.latent > 0 ? std::max(kLatentNumbers, kernels.most_numbers) : kernels.most_numbers;
    const int64_t most = numbers / (job.group() * job.cache.head_dim), least = kernels.least_rows / job.group();
    // Smaller ones where that gives the threads more to share.
    const int64_t fair = ceil_div(job.tokens * job.cache.kv_heads * job.slices(), kItemsPerThread * threads);
    return std::max<int64_t>(1, std::min(most, std::max(least, fair)));
}

// Calls f(item, cost) for every (block of tokens, key head or slice of its query heads) of every job.
template <typename F>
void each_item(const AttentionKernels& kernels, int threads, const AttentionJob* jobs, int64_t count, F f) {
    for (int64_t j = 0; j < count; ++j) {
        const AttentionJob& job = jobs[j];
        const int64_t step = tokens_per_item(kernels, job, threads);
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
Plan make_plan(const AttentionKernels& kernels, int threads, const AttentionJob* jobs, int64_t count) {
    int64_t total = 0;
    each_item(kernels, threads, jobs, count, [&](const AttentionItem&, int64_t cost) { total += cost; });
    const int64_t limit = threads == 1 ? total : total / (kItemsPerThread * threads);
    Plan plan;
    each_item(kernels, threads, jobs, count, [&](const AttentionItem& item, int64_t cost) {
        const AttentionJob& job = jobs[item.job];
        plan.scratch_floats =
            std::max(plan.scratch_floats, kernels.scratch(job, item.num_tokens));
        if (cost <= limit || item.num_spans == 1) {
            plan.items.push_back({item, cost, kNoPartial});
            return;
        }
        plan.merges.push_back({item, 0, plan.partial_floats});
        const int64_t floats = kernels.state(job, item.num_tokens);
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

// Tiles keep 16 bits of a number, which would take digits from a cache of floats.
const AttentionKernels& kernels_for(const Compute& compute, Form form, CacheType type) {
    return on_tiles(compute, form) && type != CacheType::F32 ? compute.set.tiles->attention : compute.set.dense->attention;
}

}  // namespace

void attention(const Compute& compute, Form form, const AttentionJob* jobs, int64_t count) {
    if (count == 0) return;
    // Where sequences alone keep the threads busy, an item has more heads: they share the conversion of a latent row.
    std::vector<AttentionJob> wide;
    if (jobs[0].cache.latent > 0 && count >= kItemsPerThread * compute.pool.threads()) {
        wide.assign(jobs, jobs + count);
        for (AttentionJob& job : wide) job.item_heads = kManyHeads;
        jobs = wide.data();
    }
    const AttentionKernels& kernels = kernels_for(compute, form, jobs[0].cache.type);
    const Plan plan = make_plan(kernels, compute.pool.threads(), jobs, count);
    thread_local Scratch partial_states;
    float* const states = partial_states.get<float>(plan.partial_floats);
    compute.pool.for_each(static_cast<int64_t>(plan.items.size()), [&](int64_t i) {
        const Entry& entry = plan.items[static_cast<size_t>(i)];
        thread_local Scratch scratch;
        kernels.run(jobs[entry.item.job], entry.placed(states), scratch.get<float>(plan.scratch_floats));
    });
    compute.pool.for_each(static_cast<int64_t>(plan.merges.size()), [&](int64_t i) {
        const Entry& entry = plan.merges[static_cast<size_t>(i)];
        kernels.merge(jobs[entry.item.job], entry.placed(states));
    });
}

}  // namespace thermocline
