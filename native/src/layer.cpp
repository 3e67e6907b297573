#include "thermocline/layer.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "missing_pages.h"
#include "scratch.h"
#include "thermocline/expert_groups.h"

namespace thermocline {
namespace {

void add_bias(const float* bias, int64_t width, int64_t rows, float* x) {
    if (bias == nullptr) return;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < width; ++i) x[r * width + i] += bias[i];
}

// x lies between -limit and limit behind it.
void clip(float limit, int64_t count, float* x) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

// residual += the shared expert of normed.
void add_shared(const Compute& compute, const Dense& dense, Form form, const SharedPart& part, int64_t count,
                int64_t hidden, const float* normed, float* residual) {
    thread_local Scratch memory;
    float* scale = memory.get<float>(2 * count);
    float* logits = scale + count;
    std::vector<int32_t> rows(static_cast<size_t>(count));
    for (int64_t t = 0; t < count; ++t) {
        scale[t] = 1.0f;
        rows[static_cast<size_t>(t)] = static_cast<int32_t>(t);
    }
    if (part.has_gate) {
        const Product product{part.gate, logits, 1};
        multiply_all(compute, Form::Decode, normed, count, &product, 1);
        gate(dense, {scale, logits, count, 1, 1, 1, Activation::Sigmoid, scale});
    }
    const ExpertGroup group{part.expert, 0, count};
    const ExpertWork work{&group, 1, normed, count, hidden, rows.data(), scale, count};
    expert_sum(compute, form, work, rows.data(), 1, residual, residual);
}

// x [tokens, hidden] *= each token's weight, which becomes 1.
void weigh_inputs(ThreadPool& pool, int64_t tokens, int64_t hidden, float* x, float* weights) {
    auto weigh = [&](int64_t t) {
        for (int64_t i = 0; i < hidden; ++i) x[t * hidden + i] *= weights[t];
        weights[t] = 1.0f;
    };
    if (tokens == 1) return weigh(0);  // too little for other threads to be woken
    pool.for_each(tokens, weigh);
}

// Numbers that one thread copies at a time: some ten microseconds' worth.
constexpr int64_t kCopyNumbers = 1 << 16;

void copy_state(ThreadPool& pool, const StateSizes& sizes, const StateTokens& tokens, int64_t from, int64_t to) {
    const auto copy = [&](float* states, int64_t numbers) {
        if (numbers == 0) return;
        const float* source = states + from * numbers;
        float* target = states + to * numbers;
        pool.for_each((numbers + kCopyNumbers - 1) / kCopyNumbers, [&](int64_t piece) {
            const int64_t first = piece * kCopyNumbers, count = std::min(kCopyNumbers, numbers - first);
            std::memcpy(target + first, source + first, static_cast<size_t>(count) * sizeof(float));
        });
    };
    copy(tokens.conv_states, sizes.conv());
    copy(tokens.states, sizes.recurrent());
}

// Calls recur(runs, number of runs) in rounds, a slot once in each, and copies states after each round.
template <typename Recur>
void each_round(ThreadPool& pool, const StateSizes& sizes, const StateTokens& tokens, Recur recur) {
    std::vector<int64_t> left(static_cast<size_t>(tokens.num_runs));
    for (size_t r = 0; r < left.size(); ++r) left[r] = static_cast<int64_t>(r);
    while (!left.empty()) {
        std::vector<StateRun> now;
        std::vector<int64_t> mine, others;
        for (const int64_t r : left) {
            const auto has_slot = [&](const StateRun& run) { return run.slot == tokens.runs[r].slot; };
            if (std::any_of(now.begin(), now.end(), has_slot)) {
                others.push_back(r);
                continue;
            }
            now.push_back(tokens.runs[r]);
            mine.push_back(r);
        }
        recur(now.data(), static_cast<int64_t>(now.size()));
        for (const int64_t r : mine)
            if (tokens.copies[r] >= 0) copy_state(pool, sizes, tokens, tokens.runs[r].slot, tokens.copies[r]);
        left = std::move(others);
    }
}

}  // namespace

void attend(const Compute& compute, const Dense& dense, Form form, const AttentionPart& part,
            const LayerTokens& tokens, const LayerCacheView& cache, const float* x, float* out, float* given) {
    const int64_t count = tokens.count, hidden = part.output.rows, out_row = part.output.cols, kv_row = part.k.rows;
    const int64_t head_dim = cache.shape.head_dim, value_dim = cache.shape.value_dim(), heads = out_row / value_dim;
    const int64_t row = heads * head_dim, v_row = part.v.rows, q_row = part.q.rows;
    const bool has_gate = part.gate.from == OutputGate::From::Weight;
    const int64_t gate_row = has_gate ? part.gate.weight.rows : 0;
    thread_local Scratch memory;
    float* own = memory.get<float>(count * (hidden + q_row + row + out_row + kv_row + v_row + gate_row));
    float* const normed = given != nullptr ? given : own;
    float* both = own + count * hidden;  // queries, with gates between them if they have some
    float* q = both + count * q_row;
    float* k = q + count * row;
    float* v = k + count * kv_row;
    float* attended = v + count * v_row;
    float* gates = attended + count * out_row;

    norm_rows(dense, x, part.norm, part.centering, part.epsilon, count, hidden, normed);
    // Values may be the keys before their norm.
    const bool has_values = part.v.data != part.k.data;
    const bool has_keys = part.k.data != nullptr;
    Product products[4] = {{part.q, both, q_row}, {part.k, k, kv_row}};
    int64_t num_products = has_keys ? 2 : 1;
    if (has_values) products[num_products++] = {part.v, v, v_row};
    else v = k;
    if (has_gate) products[num_products++] = {part.gate.weight, gates, gate_row};
    multiply_all(compute, form, normed, count, products, num_products);
    if (part.gate.from == OutputGate::From::Queries) {
        for (int64_t h = 0; h < count * heads; ++h)
            std::memcpy(q + h * head_dim, both + 2 * h * head_dim, static_cast<size_t>(head_dim) * sizeof(float));
    } else {
        q = both;
    }
    add_bias(part.q_bias, row, count, q);
    add_bias(part.k_bias, kv_row, count, k);
    if (has_values) add_bias(part.v_bias, v_row, count, v);
    if (part.clip > 0.0f) {
        for (const auto& [rows, width] : {std::pair{q, row}, {k, has_keys ? kv_row : 0}, {v, has_values ? v_row : 0}})
            clip(part.clip, width * count, rows);
    }
    if (part.wide_q_gain != nullptr) {
        rms_norm(dense, q, part.wide_q_gain, part.epsilon, count, row, q);
        rms_norm(dense, k, part.wide_k_gain, part.epsilon, count, kv_row, k);
    }
    prepare_heads(dense, {q, has_keys ? k : nullptr, v, count, heads, part.q_gain, part.k_gain, part.epsilon, tokens.cosines,
                          tokens.sines, tokens.rotary_dims, tokens.rope, cache.shape, cache.keys, cache.values,
                          tokens.slots, part.norm_last, part.v_gain});
    std::vector<AttentionJob> jobs;
    for (int64_t s = 0; s < tokens.sequences; ++s) {
        const int64_t first = tokens.starts[s], length = tokens.starts[s + 1] - first;
        if (length == 0) continue;
        jobs.push_back({q + first * row, tokens.positions + first, length, heads, cache.shape, cache.keys,
                        cache.values, tokens.block_tables + tokens.table_starts[s], part.scale, 0.0f, part.window,
                        attended + first * out_row, part.sinks, part.chunked, part.temperature});
    }
    attention(compute, form, jobs.data(), static_cast<int64_t>(jobs.size()));
    if (has_gate) {
        const int64_t width = gate_row / heads;
        gate(dense, {attended, gates, count * heads, value_dim, width, width, part.gate.activation, attended});
    } else if (part.gate.from == OutputGate::From::Queries) {
        gate(dense, {attended, both + head_dim, count * heads, head_dim, head_dim, 2 * head_dim,
                     part.gate.activation, attended});
    }
    const bool is_normed = part.post.gain != nullptr;
    const Product output{part.output, is_normed ? normed : out, hidden, is_normed ? nullptr : x};
    multiply_all(compute, form, attended, count, &output, 1);
    add_bias(part.output_bias, hidden, count, is_normed ? normed : out);
    if (is_normed) add_normed(dense, {x, normed, nullptr, count, hidden, part.post, out});
}

void attend(const Compute& compute, const Dense& dense, Form form, const Layer& layer, const LayerTokens& tokens,
            const LayerCacheView& cache, const float* x, float* out, float* handed) {
    if (layer.handed_on == HandedOn::Input)
        std::memcpy(handed, x, static_cast<size_t>(tokens.count * layer.hidden) * sizeof(float));
    attend(compute, dense, form, layer.attention, tokens, cache, x, out,
           layer.handed_on == HandedOn::Normed ? handed : nullptr);
}

void apply_delta(const Compute& compute, const Dense& dense, Form form, const DeltaPart& part,
                 const StateTokens& tokens, const float* x, float* out) {
    const int64_t count = tokens.count, hidden = part.output.rows, width = part.output.cols;
    const int64_t channels = part.rule.shape.channels(), steps = part.alpha.rows, heads = part.beta.rows;
    const auto rank = [](const Weight& low) { return low.data == nullptr ? 0 : low.rows; };
    thread_local Scratch memory;
    float* normed = memory.get<float>(
        count * (hidden + channels + 2 * width + steps + heads + rank(part.z_low) + rank(part.alpha_low)));
    float* mixed = normed + count * hidden;
    float* z = mixed + count * channels;
    float* read = z + count * width;
    float* alpha = read + count * width;
    float* beta = alpha + count * steps;
    float* z_low = beta + count * heads;
    float* alpha_low = z_low + count * rank(part.z_low);

    rms_norm(dense, x, part.norm, part.rule.epsilon, count, hidden, normed);
    Product products[DeltaPart::kMaxMixed + 3];
    int num_products = 0;
    int64_t channel = 0;
    for (int m = 0; m < part.num_mixed; ++m) {
        products[num_products++] = {part.mixed[m], mixed + channel, channels};
        channel += part.mixed[m].rows;
    }
    const auto first = [&](const Weight& low, float* narrow, const Weight& whole, float* wide) {
        const bool has_low = low.data != nullptr;
        products[num_products++] = has_low ? Product{low, narrow, low.rows} : Product{whole, wide, whole.rows};
    };
    first(part.z_low, z_low, part.z, z);
    first(part.alpha_low, alpha_low, part.alpha, alpha);
    products[num_products++] = {part.beta, beta, heads};
    multiply_all(compute, form, normed, count, products, num_products);
    const auto second = [&](const Weight& low, const float* narrow, const Weight& whole, float* wide) {
        if (low.data == nullptr) return;
        const Product product{whole, wide, whole.rows};
        multiply_all(compute, form, narrow, count, &product, 1);
    };
    second(part.z_low, z_low, part.z, z);
    second(part.alpha_low, alpha_low, part.alpha, alpha);
    DeltaJob job = part.rule;
    job.mixed = mixed;
    job.z = z;
    job.alpha = alpha;
    job.beta = beta;
    job.conv_states = tokens.conv_states;
    job.states = tokens.states;
    job.out = read;
    each_round(dense.pool, job.shape.state(), tokens, [&](const StateRun* runs, int64_t num_runs) {
        job.runs = runs;
        job.num_runs = num_runs;
        delta_rule(dense, job);
    });
    const Product output{part.output, out, hidden, x};
    multiply_all(compute, form, read, count, &output, 1);
}

namespace {

// read = the first Mamba's output of rows [count, 2, width].
void apply_selective(const Compute& compute, const Dense& dense, Form form, const RecurrentPart& part,
                     const StateTokens& tokens, const float* rows, float* read) {
    const SelectiveProducts& given = part.products;
    const SelectiveShape& shape = part.selective.shape;
    const int64_t count = tokens.count, rank = given.low.rows, state_dim = shape.state_dim;
    thread_local Scratch memory;
    float* convolved = memory.get<float>(count * (2 * shape.width + rank + 2 * state_dim));
    float* steps = convolved + count * shape.width;
    float* low = steps + count * shape.width;
    float* keys = low + count * rank;
    float* queries = keys + count * state_dim;

    SelectiveJob job = part.selective;
    job.rows = rows;
    job.conv_states = tokens.conv_states;
    job.states = tokens.states;
    job.out = convolved;
    // Copies of states are of what a round has moved on: first of channels, then of the rest.
    StateSizes channels = part.state, rest = part.state;
    channels.heads = 0;
    rest.kept = 0;
    const auto each = [&](const StateSizes& sizes, void (*compute_runs)(const Dense&, const SelectiveJob&)) {
        each_round(dense.pool, sizes, tokens, [&](const StateRun* runs, int64_t num_runs) {
            job.runs = runs;
            job.num_runs = num_runs;
            compute_runs(dense, job);
        });
    };
    each(channels, selective_convolution);
    const Product products[3] = {{given.low, low, rank}, {given.keys, keys, state_dim}, {given.queries, queries, state_dim}};
    multiply_all(compute, form, convolved, count, products, 3);
    rms_norm(dense, low, given.low_gain, part.epsilon, count, rank, low);
    rms_norm(dense, keys, given.key_gain, part.epsilon, count, state_dim, keys);
    rms_norm(dense, queries, given.query_gain, part.epsilon, count, state_dim, queries);
    const Product second{given.steps, steps, shape.width};
    multiply_all(compute, form, low, count, &second, 1);
    job.convolved = convolved;
    job.steps = steps;
    job.keys = keys;
    job.queries = queries;
    job.out = read;
    each(rest, selective_scan);
}

}  // namespace

void apply_recurrent(const Compute& compute, const Dense& dense, Form form, const RecurrentPart& part,
                     const StateTokens& tokens, const float* x, float* out) {
    const int64_t count = tokens.count, hidden = part.output.rows, width = part.output.cols, row = part.input.rows;
    thread_local Scratch memory;
    float* normed = memory.get<float>(count * (hidden + row + width));
    float* rows = normed + count * hidden;
    float* read = rows + count * row;

    rms_norm(dense, x, part.norm, part.epsilon, count, hidden, normed);
    const Product input{part.input, rows, row};
    multiply_all(compute, form, normed, count, &input, 1);
    const auto recur = [&](auto job, auto compute_runs) {
        job.rows = rows;
        job.conv_states = tokens.conv_states;
        job.out = read;
        each_round(dense.pool, part.state, tokens, [&](const StateRun* runs, int64_t num_runs) {
            job.runs = runs;
            job.num_runs = num_runs;
            compute_runs(job);
        });
    };
    if (part.kind == RecurrentPart::Kind::Selective) {
        apply_selective(compute, dense, form, part, tokens, rows, read);
    } else if (part.kind == RecurrentPart::Kind::ShortConv) {
        recur(part.conv, [&](const ShortConvJob& job) { short_convolution(dense, job); });
    } else {
        recur(part.mamba, [&](MambaJob job) {
            job.states = tokens.states;
            mamba(dense, job);
        });
    }
    const Product output{part.output, out, hidden, x};
    multiply_all(compute, form, read, count, &output, 1);
}

void choose_experts(const Compute& compute, const Dense& dense, Form form, const Layer& layer, int64_t tokens,
                    float* residual, float* normed, float* logits, float* kept, int32_t* ids, float* weights) {
    if (layer.norm == nullptr) return;
    const int64_t wide = tokens * layer.hidden;
    const bool is_normed = layer.end.gain != nullptr;
    float* const shared = is_normed ? kept + wide : residual;
    const auto score = [&] {
        const Product routing{layer.router.matrix, logits, layer.router.matrix.rows};
        multiply_all(compute, Form::Decode, normed, tokens, &routing, 1);
    };
    if (layer.handed_on == HandedOn::Input) score();
    if (layer.handed_on != HandedOn::Normed)
        norm_rows(dense, residual, layer.norm, layer.centering, layer.epsilon, tokens, layer.hidden, normed);
    if (is_normed) std::fill_n(shared, wide, 0.0f);
    if (layer.shared.exists) add_shared(compute, dense, form, layer.shared, tokens, layer.hidden, normed, shared);
    if (!layer.is_routed) {
        if (is_normed) add_normed(dense, {residual, shared, nullptr, tokens, layer.hidden, layer.end, residual});
        return;
    }
    const RouterPart& router = layer.router;
    if (is_normed) {
        std::memcpy(kept, residual, static_cast<size_t>(wide) * sizeof(float));
        std::fill_n(residual, wide, 0.0f);
    }
    const float* const stream = is_normed ? kept : residual;
    if (router.norm != nullptr) rms_norm(dense, stream, router.norm, layer.epsilon, tokens, layer.hidden, normed);
    if (layer.handed_on != HandedOn::Input) score();
    route(dense, {logits, tokens, router.matrix.rows, router.rule, ids, weights});
    if (router.experts_norm != nullptr)
        rms_norm(dense, stream, router.experts_norm, layer.epsilon, tokens, layer.hidden, normed);
    if (router.weighs_input) weigh_inputs(dense.pool, tokens, layer.hidden, normed, weights);
}

void finish_layer(const Dense& dense, const Layer& layer, int64_t tokens, const float* kept, const float* sums,
                  float* out) {
    if (layer.end.gain == nullptr) return;
    add_normed(dense, {kept, kept + tokens * layer.hidden, sums, tokens, layer.hidden, layer.end, out});
}

namespace {

// x [count, hidden] += what the layer adds of its embeddings of the tokens.
void add_embedding(const Compute& compute, const Dense& dense, Form form, const EmbeddingPart& part, int64_t count,
                   const float* embedded, float* x) {
    const int64_t width = part.gate.rows, hidden = part.up.rows;
    thread_local Scratch memory;
    float* gates = memory.get<float>(count * (2 * width + hidden));
    float* gated = gates + count * width;
    float* added = gated + count * width;
    const Product first{part.gate, gates, width};
    multiply_all(compute, form, x, count, &first, 1);
    gate(dense, {embedded, gates, count, width, width, width, Activation::Gelu, gated});
    const Product second{part.up, added, hidden};
    multiply_all(compute, form, gated, count, &second, 1);
    add_normed(dense, {x, added, nullptr, count, hidden, part.norm, x});
}

// A layer whose mix(out, handed) writes the residual stream after attention or what takes its place, and what it hands on.
template <typename Mix>
void run(const Compute& compute, const Dense& dense, Form form, const Layer& layer, int64_t count, Mix mix, float* out,
         int32_t* ids, float* weights, const OnRouted& on_routed) {
    const int64_t hidden = layer.hidden, experts = layer.is_routed ? layer.router.matrix.rows : 0;
    const auto marked = [&](LayerMark part) { compute.pool.mark(static_cast<int64_t>(part)); };
    thread_local Scratch memory;
    const int64_t num_kept = layer.end.gain != nullptr ? 2 : 0;
    const int64_t width = layer.around.exist ? layer.around.down.rows : 0;
    float* own = memory.get<float>(count * ((2 + num_kept) * hidden + experts + 2 * width));
    float* normed = own + count * hidden;
    float* kept = normed + count * hidden;
    float* logits = kept + count * num_kept * hidden;
    float* residual = layer.is_routed ? own : out;

    marked(LayerMark::Attend);
    mix(residual, normed);
    marked(LayerMark::Route);
    choose_experts(compute, dense, form, layer, count, residual, normed, logits, kept, ids, weights);
    if (!layer.is_routed) return;
    marked(LayerMark::Experts);
    thread_local ExpertGroups pairs;
    pairs.sort({experts, layer.experts}, count, layer.router.rule.chosen, ids, weights);
    if (on_routed) {
        on_routed(num_kept ? kept : residual);
        put_present_first(pairs.groups());
    }
    const int64_t chosen = layer.router.rule.chosen;
    if (layer.around.exist) {
        float* narrow = logits + count * experts;
        float* sums = narrow + count * width;
        const Product down{layer.around.down, narrow, width};
        multiply_all(compute, form, normed, count, &down, 1);
        std::fill_n(sums, count * width, 0.0f);
        expert_sum(compute, form, pairs.work(narrow, count, width), pairs.pair_of(), chosen, sums, sums);
        const Product up{layer.around.up, out, hidden, residual};
        multiply_all(compute, form, sums, count, &up, 1);
        return;
    }
    expert_sum(compute, form, pairs.work(normed, count, hidden), pairs.pair_of(), chosen, residual, out);
    finish_layer(dense, layer, count, kept, out, out);
}

}  // namespace

void run_layer(const Compute& compute, const Dense& dense, Form form, const Layer& layer, const LayerTokens& tokens,
               const LayerCacheView& cache, const float* x, float* out, int32_t* ids, float* weights,
               const OnRouted& on_routed) {
    const auto mix = [&](float* residual, float* normed) {
        if (layer.is_latent)
            attend(compute, dense, form, layer.latent, tokens, cache, x, residual);
        else
            attend(compute, dense, form, layer, tokens, cache, x, residual, normed);
    };
    run(compute, dense, form, layer, tokens.count, mix, out, ids, weights, on_routed);
    if (layer.embedding.exists) add_embedding(compute, dense, form, layer.embedding, tokens.count, tokens.embedded, out);
}

void run_layer(const Compute& compute, const Dense& dense, Form form, const Layer& layer, const StateTokens& tokens,
               const float* x, float* out, int32_t* ids, float* weights, const OnRouted& on_routed) {
    const auto mix = [&](float* residual, float*) {
        if (layer.recurrent.kind == RecurrentPart::Kind::Nothing)
            apply_delta(compute, dense, form, layer.delta, tokens, x, residual);
        else
            apply_recurrent(compute, dense, form, layer.recurrent, tokens, x, residual);
    };
    run(compute, dense, form, layer, tokens.count, mix, out, ids, weights, on_routed);
}

void run_layer(const Compute& compute, const Dense& dense, Form form, const Layer& layer, int64_t tokens,
               const float* x, float* out, int32_t* ids, float* weights, const OnRouted& on_routed) {
    const auto mix = [&](float* residual, float*) {
        std::memcpy(residual, x, static_cast<size_t>(tokens * layer.hidden) * sizeof(float));
    };
    run(compute, dense, form, layer, tokens, mix, out, ids, weights, on_routed);
}

}  // namespace thermocline
