// Compares every instruction set that this machine has with the portable one, on random data of every
// type; exits with 1 where they differ. Needs no Python, so that it runs under an emulator and under
// sanitizers as well.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "thermocline/codebooks.h"
#include "thermocline/dense.h"
#include "thermocline/matmul.h"
#include "thermocline/recurrent.h"
#include "thermocline/unpack.h"

using namespace thermocline;

namespace {

constexpr int kTypes[] = {kF32, kF16, kBF16, 2,  3,  6,  7,  8,  10, 11, 12, 13, 14,
                          16,   17,   18,    19, 20, 21, 22, 23, 29, 34, 35, 39, 40};
constexpr double kProductTolerance = 1e-9;  // NMSE; sums are fused or not, and single ones may cancel
constexpr double kAttentionTolerance = 1e-9;  // on tiles numbers have 16 bits
constexpr double kStreamTolerance = 1e-10;   // sums are fused or not
constexpr double kExpertTolerance = 1e-6;    // a last bit may move an inner activation by one step

std::mt19937 g_random(1);
int g_failures = 0;

void expect(bool holds, const char* set, int type_id, const std::string& what) {
    if (holds) return;
    ++g_failures;
    std::printf("FAIL %s, type %d: %s\n", set, type_id, what.c_str());
}

// Any entries that the types can have will do.
void publish_codebooks() {
    const struct { int type_id, size, largest; } books[] = {{16, 256 * 8, 63}, {17, 512 * 8, 63}, {22, 1024 * 8, 63},
                                                            {18, 256 * 4, 63}, {21, 512 * 4, 15}, {19, 2048 * 8, 16}};
    for (const auto& book : books) {
        std::vector<uint8_t> bytes(static_cast<size_t>(book.size));
        for (auto& byte : bytes) byte = static_cast<uint8_t>(g_random() % static_cast<unsigned>(book.largest + 1));
        expect(set_codebook(book.type_id, bytes.data(), book.size), "codebook", book.type_id, "refused");
    }
}

std::vector<float> normal(int64_t count) {
    std::normal_distribution<float> draw;
    std::vector<float> values(static_cast<size_t>(count));
    for (auto& value : values) value = draw(g_random);
    return values;
}

struct Matrix {
    std::vector<uint8_t> bytes;
    Weight weight;
};

// Random bytes, block by block, that decode to numbers neither tiny nor huge.
Matrix random_matrix(int type_id, int64_t rows, int64_t cols) {
    const GemmKernels& portable = *find_kernel_set("portable")->set.gemm;
    FormatInfo info{};
    format_info(type_id, info);
    const int64_t step = info.block_elements, row_bytes = cols / step * info.block_bytes;
    Matrix m{std::vector<uint8_t>(static_cast<size_t>(rows * row_bytes)), {}};
    std::vector<float> decoded(static_cast<size_t>(step));
    for (size_t at = 0; at < m.bytes.size(); at += static_cast<size_t>(info.block_bytes)) {
        for (double power = 0.0; !(power > 0.01 && power < 9.0);) {
            for (int64_t i = 0; i < info.block_bytes; ++i) m.bytes[at + static_cast<size_t>(i)] = static_cast<uint8_t>(g_random());
            portable.decode_row(type_id, &m.bytes[at], step, decoded.data());
            power = 0.0;
            for (float value : decoded) power += static_cast<double>(value) * value / static_cast<double>(step);
        }
    }
    m.weight = {type_id, m.bytes.data(), rows, cols, row_bytes};
    return m;
}

double nmse(const std::vector<float>& a, const std::vector<float>& b) {
    double error = 0.0, power = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double off = static_cast<double>(a[i]) - b[i];
        error += off * off;
        power += static_cast<double>(b[i]) * b[i];
    }
    return power > 0.0 ? error / power : error;
}

bool same_bits(const float* a, const float* b, int64_t count) {
    return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

std::vector<float> product(const Compute& compute, const Weight& w, const float* x, int64_t tokens) {
    std::vector<float> out(static_cast<size_t>(tokens * w.rows), NAN);
    const Product wanted{w, out.data(), w.rows};
    multiply_all(compute, x, tokens, &wanted, 1);
    return out;
}

void compare_decoded(const KernelSet& set, const KernelSet& portable, const Matrix& m) {
    const Weight& w = m.weight;
    std::vector<float> ours(static_cast<size_t>(w.cols)), theirs(ours.size());
    for (int64_t r = 0; r < w.rows; ++r) {
        set.gemm->decode_row(w.type_id, w.row(r), w.cols, ours.data());
        portable.gemm->decode_row(w.type_id, w.row(r), w.cols, theirs.data());
        if (!same_bits(ours.data(), theirs.data(), w.cols)) return expect(false, set.name, w.type_id, "decoded rows differ");
    }
}

// Panels to the bit: every count of columns that a last span can have, few rows and all of them, either group.
void compare_panels(const KernelSet& set, const KernelSet& portable, int type_id) {
    UnpackInfo info{};
    if (!unpack_info(type_id, info)) return;
    auto ours = std::make_unique<QuantPanel>(), theirs = std::make_unique<QuantPanel>();
    const Matrix m = random_matrix(type_id, kStripRows, kSpan);
    const auto same = [&](int64_t count, int group, int rows) {
        const PackSource from{m.weight.data, m.weight.row_bytes, rows, count, {}};
        set.gemm->pack(type_id, from, group, 1, *ours);
        portable.gemm->pack(type_id, from, group, 1, *theirs);
        const auto scales = static_cast<int64_t>(count / group * kStripRows);
        return std::memcmp(ours->q[1], theirs->q[1], static_cast<size_t>(count * kStripRows)) == 0 &&
               same_bits(ours->scale[1][0], theirs->scale[1][0], scales) &&
               (!info.has_minimum || same_bits(ours->minimum[1][0], theirs->minimum[1][0], scales));
    };
    for (int64_t count = info.block_elements; count <= kSpan; count += info.block_elements)
        for (int group = kGroupMin; group <= info.group; group += kGroupMin)
            for (const int rows : {1, kStripRows - 1, kStripRows})
                expect(same(count, group, rows), set.name, type_id,
                       "a panel of " + std::to_string(rows) + " rows and " + std::to_string(count) + " columns differs");
}

// Returns the largest NMSE.
double compare_products(const Compute& ours, const Compute& portable, int type_id, int64_t cols) {
    double worst = 0.0;
    for (const int64_t rows : {1, 15, 16, 17, 33, 100}) {
        const Matrix m = random_matrix(type_id, rows, cols);
        compare_decoded(ours.set, portable.set, m);
        for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 13}) {
            const auto x = normal(tokens * cols);
            const auto together = product(ours, m.weight, x.data(), tokens);
            const double found = nmse(together, product(portable, m.weight, x.data(), tokens));
            worst = found > worst ? found : worst;
            expect(found <= kProductTolerance, ours.set.name, type_id,
                   std::to_string(rows) + " rows, " + std::to_string(tokens) + " tokens: NMSE " + std::to_string(found * 1e10) + "e-10");
            const auto alone = product(ours, m.weight, &x[static_cast<size_t>((tokens - 1) * cols)], 1);
            expect(same_bits(alone.data(), &together[static_cast<size_t>((tokens - 1) * rows)], rows), ours.set.name,
                   type_id, "a token feels its neighbours");
        }
    }
    return worst;
}

// Both ways of asking for weights give the same bits, whichever this processor takes: three, four and eight spans.
void compare_asking(ThreadPool& pool, const KernelSet& set, int type_id) {
    KernelSet far = set, near = set;
    far.asks_nearest = false;
    near.asks_nearest = true;
    for (const int64_t spans : {3, 4, 8}) {
        const Matrix m = random_matrix(type_id, 100, spans * kSpan);
        for (const int64_t tokens : {1, 2, 33}) {
            const auto x = normal(tokens * spans * kSpan);
            const auto one = product({pool, far}, m.weight, x.data(), tokens);
            const auto other = product({pool, near}, m.weight, x.data(), tokens);
            expect(same_bits(one.data(), other.data(), tokens * 100), set.name, type_id, "asking otherwise gives other numbers");
        }
    }
}

// Zeros stay zeros, and what is not finite stays with its token.
void check_special(const Compute& compute, int type_id, int64_t cols) {
    const Matrix m = random_matrix(type_id, 20, cols);
    auto x = normal(4 * cols);
    const auto before = product(compute, m.weight, x.data(), 4);
    for (int64_t k = 0; k < cols; ++k) x[static_cast<size_t>(k)] = 0.0f;
    x[static_cast<size_t>(cols)] = NAN;
    x[static_cast<size_t>(3 * cols - 1)] = INFINITY;
    const auto after = product(compute, m.weight, x.data(), 4);
    bool zeros = true, broken = true;
    for (size_t n = 0; n < 20; ++n) {
        zeros = zeros && after[n] == 0.0f;
        broken = broken && !std::isfinite(after[20 + n]) && !std::isfinite(after[40 + n]);
    }
    expect(zeros, compute.set.name, type_id, "zeros do not give zeros");
    expect(broken, compute.set.name, type_id, "a number that is not finite is lost");
    expect(same_bits(&before[60], &after[60], 20), compute.set.name, type_id, "a token feels its broken neighbour");
}

// has_biases: of every product.
double compare_experts(const Compute& ours, const Compute& portable, ExpertActivation activation, bool has_biases) {
    constexpr int64_t kHidden = 256, kInner = 256, kTokens = 9, kCount = 3;
    std::vector<Matrix> matrices;
    std::vector<ExpertGroup> groups;
    const int down_types[kCount] = {14, 8, kF16};
    matrices.reserve(3 * kCount);
    for (int64_t e = 0; e < kCount; ++e) {
        matrices.push_back(random_matrix(12, kInner, kHidden));
        matrices.push_back(random_matrix(e == 1 ? 13 : 12, kInner, kHidden));
        matrices.push_back(random_matrix(down_types[e], kHidden, kInner));
        const Matrix* m = &matrices[static_cast<size_t>(3 * e)];
        groups.push_back({{m[0].weight, m[1].weight, m[2].weight, activation}, e * kTokens, kTokens});
        if (activation == ExpertActivation::LimitedSilu) groups.back().weights.limits = {0.8f, 0.7f};
    }
    const auto biases = normal(3 * kHidden);
    for (ExpertGroup& group : groups)
        if (has_biases) {
            group.weights.gate_bias = biases.data();
            group.weights.up_bias = biases.data() + kHidden;
            group.weights.down_bias = biases.data() + 2 * kHidden;
        }
    const auto x = normal(kTokens * kHidden), scale = normal(kCount * kTokens), residual = normal(kTokens * kHidden);
    std::vector<int32_t> rows, pair_of;
    for (int64_t e = 0; e < kCount; ++e)
        for (int32_t t = 0; t < kTokens; ++t) rows.push_back(t);
    for (int32_t t = 0; t < kTokens; ++t)
        for (int32_t e = 0; e < kCount; ++e) pair_of.push_back(e * static_cast<int32_t>(kTokens) + t);
    const ExpertWork work{groups.data(), kCount, x.data(), kTokens, kHidden, rows.data(), scale.data(), kCount * kTokens};
    std::vector<float> a(static_cast<size_t>(kCount * kTokens * kHidden), NAN), b = a;
    expert_outputs(ours, work, a.data());
    expert_outputs(portable, work, b.data());
    const double found = nmse(a, b);
    expect(found <= kExpertTolerance, ours.set.name, -1, "experts differ");

    std::vector<float> sum(static_cast<size_t>(kTokens * kHidden), NAN);
    expert_sum(ours, work, pair_of.data(), kCount, residual.data(), sum.data());
    bool same = true;
    for (size_t i = 0; i < sum.size(); ++i) {
        const size_t stride = static_cast<size_t>(kTokens * kHidden);
        same = same && sum[i] == a[i] + a[i + stride] + a[i + 2 * stride] + residual[i];
    }
    expect(same, ours.set.name, -1, "the sum is not that of the outputs");
    return found;
}

std::vector<uint16_t> bfloats(int64_t count) {
    std::vector<uint16_t> values;
    for (const float drawn : normal(count)) {
        uint16_t bits;
        std::memcpy(&bits, reinterpret_cast<const char*>(&drawn) + 2, 2);
        values.push_back(bits);
    }
    return values;
}

std::vector<int32_t> counted(int64_t first, int64_t count) {
    std::vector<int32_t> numbers;
    for (int64_t i = 0; i < count; ++i) numbers.push_back(static_cast<int32_t>(first + i));
    return numbers;
}

// A job's tokens together, and its last one alone. Returns the NMSE.
double compare_job(const Compute& ours, const Compute& portable, Form form, AttentionJob job) {
    const int64_t row = job.heads * job.value_dim(), last = job.tokens - 1;
    std::vector<float> a(static_cast<size_t>(job.tokens * row), NAN), b = a, alone(static_cast<size_t>(row), NAN);
    job.out = a.data();
    attention(ours, form, &job, 1);
    job.out = b.data();
    attention(portable, form, &job, 1);
    const double found = nmse(a, b);
    expect(found <= kAttentionTolerance, ours.set.name, kBF16, "attention differs");
    job.q += last * job.heads * job.key_dim();
    job.positions += last;
    job.chosen = job.chosen_of(last, 0);
    job.tokens = 1;
    job.out = alone.data();
    attention(ours, form, &job, 1);
    expect(same_bits(alone.data(), &a[static_cast<size_t>(last * row)], row), ours.set.name, kBF16,
           "attention of a token feels its neighbours");
    return found;
}

// Attention with and without a choice of positions, whose bits are few enough that groups and whole spans are not read; of
// the last tokens of a sequence. Returns the largest NMSE.
double compare_attention(const Compute& ours, const Compute& portable, Form form) {
    constexpr int64_t kTokens = 9, kHeads = 6, kContext = 1100, kWords = kContext / kWordPositions + 1;
    double worst = 0.0;
    for (const int64_t block_tokens : {16, 5}) {
        const CacheShape cache{CacheType::BF16, kContext / block_tokens + 1, block_tokens, 2, 48};
        const auto keys = bfloats(cache.num_blocks * 2 * block_tokens * 48);
        const auto table = counted(0, cache.num_blocks), positions = counted(kContext - kTokens, kTokens);
        std::vector<uint16_t> chosen(kTokens * kWords);
        for (size_t i = 0; i < chosen.size(); ++i) {
            const bool is_last = i % kWords + 2 >= static_cast<size_t>(kWords);
            chosen[i] = static_cast<uint16_t>(is_last ? 0xffff : g_random() % 16 == 0 ? g_random() : 0u);
        }
        const auto q = normal(kTokens * kHeads * 48);
        const auto* const bytes = reinterpret_cast<const uint8_t*>(keys.data());
        AttentionJob job{q.data(), positions.data(), kTokens, kHeads, cache, bytes, bytes, table.data(), 0.1f, 0.0f, 0, nullptr};
        worst = std::max(worst, compare_job(ours, portable, form, job));
        job.chosen = chosen.data();
        job.chosen_words = kWords;
        worst = std::max(worst, compare_job(ours, portable, form, job));
    }
    return worst;
}

// Attention to latent rows beside sinks, in blocks of single rows and of several, with values that are a part or all of a
// row, with a window or without. Returns the largest NMSE.
double compare_latent(const Compute& ours, const Compute& portable, Form form) {
    constexpr int64_t kTokens = 3, kHeads = 18, kContext = 1100, kDim = 64;
    double worst = 0.0;
    const auto q = normal(kTokens * kHeads * kDim), sinks = normal(kHeads);
    const auto positions = counted(kContext - kTokens, kTokens);
    for (const int64_t block_tokens : {1, 16})
        for (const int64_t latent : {int64_t{40}, kDim}) {
            const CacheShape cache{CacheType::BF16, kContext / block_tokens + 1, block_tokens, 1, kDim, latent};
            const auto keys = bfloats(cache.num_blocks * block_tokens * kDim);
            const auto table = counted(0, cache.num_blocks);
            const auto* const bytes = reinterpret_cast<const uint8_t*>(keys.data());
            for (const int64_t window : {0, 700})
                worst = std::max(worst, compare_job(ours, portable, form,
                                                    {q.data(), positions.data(), kTokens, kHeads, cache, bytes, bytes,
                                                     table.data(), 0.1f, 0.0f, window, nullptr, sinks.data()}));
        }
    return worst;
}

// What an indexer says of all positions, and of the last of each four. Returns the largest NMSE.
double compare_scores(const Compute& ours, const Compute& portable) {
    constexpr int64_t kTokens = 3, kHeads = 5, kDim = 40, kBlock = 16, kBlocks = 20;
    const auto q = normal(kTokens * kHeads * kDim), weights = normal(kTokens * kHeads);
    const auto rows = bfloats(kBlocks * kBlock * kDim);
    const auto table = counted(0, kBlocks);
    double worst = 0.0;
    for (const int64_t step : {1, 4}) {
        const int64_t count = kBlocks * kBlock / step;
        const auto run = [&](const Compute& compute) {
            std::vector<float> out(static_cast<size_t>(kTokens * count), NAN);
            index_scores({*compute.set.dense, compute.pool},
                         {q.data(), weights.data(), kTokens, kHeads, kDim, CacheType::BF16, kBlock,
                          reinterpret_cast<const uint8_t*>(rows.data()), table.data(), count, out.data(), step});
            return out;
        };
        worst = std::max(worst, nmse(run(ours), run(portable)));
    }
    expect(worst <= kAttentionTolerance, ours.set.name, kBF16, "an indexer's scores differ");
    return worst;
}

// Every gating, the choice and experts that are given. Returns the largest NMSE of weights.
double compare_routes(const Compute& ours, const Compute& portable) {
    constexpr int64_t kTokens = 300, kExperts = 60, kChosen = 6;
    const auto logits = normal(kTokens * kExperts), bias = normal(kExperts);
    std::vector<int32_t> given;
    for (int64_t i = 0; i < kTokens * kChosen; ++i) given.push_back(static_cast<int32_t>(g_random() % kExperts));
    double worst = 0.0;
    for (const Gating gating : {Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxChosen, Gating::SqrtSoftplus,
                                Gating::NearBest})
        for (const int32_t* const ids_given : {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(given.data())}) {
            const auto run = [&](const Compute& compute, std::vector<int32_t>& ids) {
                std::vector<float> weights(kTokens * kChosen, NAN);
                route({*compute.set.dense, compute.pool},
                      {logits.data(), kTokens, kExperts, {kChosen, gating, nullptr, bias.data(), 4, 2, 2, true, 1e-5f, 1.5f},
                       ids.data(), weights.data(), nullptr, ids_given});
                return weights;
            };
            std::vector<int32_t> a(kTokens * kChosen, -1), b = a;
            worst = std::max(worst, nmse(run(ours, a), run(portable, b)));
            expect(a == b && (ids_given == nullptr || a == given), ours.set.name, -1, "other experts");
        }
    expect(worst <= kStreamTolerance, ours.set.name, -1, "weights of experts differ");
    return worst;
}

// Rows that are pooled: of many entries, of long ones, and columns that fill no vector. Returns the largest NMSE.
double compare_pools(const Compute& ours, const Compute& portable) {
    const struct { int64_t entries, count, width; } shapes[] = {{60, 8, 128}, {2, 128, 77}, {1, 3, 5}};
    double worst = 0.0;
    for (const auto& [entries, count, width] : shapes) {
        const auto rows = normal(entries * count * width), places = normal(count * width);
        auto gates = normal(entries * count * width);
        gates[0] = -HUGE_VALF;
        const int64_t last = (entries - 1) * count * width;
        const auto run = [&](const Compute& compute, int64_t first, int64_t pooled) {
            std::vector<float> out(static_cast<size_t>(pooled * width), NAN);
            pool_rows({*compute.set.dense, compute.pool}, {rows.data() + first, gates.data() + first, places.data(), pooled,
                                                           count, width, out.data()});
            return out;
        };
        const auto together = run(ours, 0, entries), alone = run(ours, last, 1);
        worst = std::max(worst, nmse(together, run(portable, 0, entries)));
        expect(same_bits(alone.data(), &together[together.size() - static_cast<size_t>(width)], width), ours.set.name, -1,
               "pooled rows feel their neighbours");
    }
    expect(worst <= kStreamTolerance, ours.set.name, -1, "pooled rows differ");
    return worst;
}

// What is taken of several streams, what is left and the shares; the last token also alone. Returns the largest NMSE.
double compare_streams(const Compute& ours, const Compute& portable) {
    constexpr int64_t kTokens = 7, kStreamWidth = 37;
    double worst = 0.0;
    for (const int64_t streams : {int64_t{2}, int64_t{4}, int64_t{5}, kMaxStreams}) {
        const int64_t count = (2 + streams) * streams, wide = streams * kStreamWidth;
        const auto x = normal(kTokens * wide), logits = normal(kTokens * count), base = normal(count), scales = normal(3);
        // In a row: taken, rest and shares.
        const auto run = [&](const Compute& compute, int64_t first, int64_t tokens) {
            std::vector<float> out(static_cast<size_t>(tokens * (kStreamWidth + wide + streams)), NAN);
            float* const rest = out.data() + tokens * kStreamWidth;
            take_streams({*compute.set.dense, compute.pool},
                         {x.data() + first * wide, logits.data() + first * count, tokens, streams, kStreamWidth,
                          {base.data(), scales.data(), 1e-6f, 20}, out.data(), rest, rest + tokens * wide});
            return out;
        };
        const auto together = run(ours, 0, kTokens), alone = run(ours, kTokens - 1, 1);
        const double found = nmse(together, run(portable, 0, kTokens));
        worst = std::max(worst, found);
        expect(found <= kStreamTolerance, ours.set.name, -1, std::to_string(streams) + " streams differ");
        int64_t begin = 0, end = 0;
        for (const int64_t width : {kStreamWidth, wide, streams}) {
            end += kTokens * width;
            expect(same_bits(&alone[static_cast<size_t>(begin)], &together[static_cast<size_t>(end - width)], width),
                   ours.set.name, -1, "streams of a token feel its neighbours");
            begin += width;
        }
    }
    return worst;
}

// The first Mamba, of states that fill vectors and of others; the last token also in a run of its own. Returns the largest
// NMSE of outputs and states.
double compare_selective(const Compute& ours, const Compute& portable) {
    constexpr int64_t kTokens = 9;
    const struct { int64_t width, state_dim, conv_width; } shapes[] = {{192, 16, 4}, {77, 7, 2}, {1, 1, 3}};
    double worst = 0.0;
    for (const auto& [width, state_dim, conv_width] : shapes) {
        const auto rows = normal(kTokens * 2 * width), conv = normal(conv_width * width), biases = normal(3 * width);
        const auto steps = normal(kTokens * width), keys = normal(kTokens * state_dim), queries = normal(kTokens * state_dim);
        const auto kept = normal((conv_width - 1) * width), state = normal(state_dim * width);
        auto decay = normal(state_dim * width);
        for (auto& value : decay) value = -std::exp(value);
        // Outputs, then the states that are left.
        const auto run = [&](const Compute& compute, const std::vector<StateRun>& runs) {
            const Dense dense{*compute.set.dense, compute.pool};
            std::vector<float> out(static_cast<size_t>(kTokens * width), NAN), convolved = out, conv_state = kept, left = state;
            SelectiveJob job{{width, state_dim, conv_width}, rows.data(), conv.data(), biases.data(), biases.data() + width,
                             decay.data(), biases.data() + 2 * width, nullptr, 1, conv_state.data(), left.data(),
                             convolved.data(), steps.data(), keys.data(), queries.data(), nullptr};
            for (const StateRun& each : runs) {
                job.runs = &each;
                job.out = convolved.data();
                selective_convolution(dense, job);
                job.out = out.data();
                selective_scan(dense, job);
            }
            out.insert(out.end(), left.begin(), left.end());
            out.insert(out.end(), conv_state.begin(), conv_state.end());
            return out;
        };
        const auto together = run(ours, {{0, kTokens, 0}}), cut = run(ours, {{0, kTokens - 1, 0}, {kTokens - 1, 1, 0}});
        worst = std::max(worst, nmse(together, run(portable, {{0, kTokens, 0}})));
        expect(same_bits(cut.data(), together.data(), static_cast<int64_t>(together.size())), ours.set.name, -1,
               "a state feels where a run is cut");
    }
    expect(worst <= kStreamTolerance, ours.set.name, -1, "the first Mamba's states differ");
    return worst;
}

// Several callers on one pool; what they compute is compared with a run alone.
void check_callers(const Compute& compute) {
    const Matrix m = random_matrix(12, 130, 256);
    const auto x = normal(7 * 256);
    const auto expected = product(compute, m.weight, x.data(), 7);
    std::vector<char> right(3, 1);
    std::vector<std::thread> callers;
    for (size_t c = 0; c < right.size(); ++c)
        callers.emplace_back([&, c] {
            for (int i = 0; i < 30; ++i)
                right[c] = right[c] && product(compute, m.weight, x.data(), 7) == expected;
        });
    for (auto& caller : callers) caller.join();
    for (const char each : right) expect(each != 0, compute.set.name, 12, "callers disturb each other");
}

}  // namespace

int main() {
    publish_codebooks();
    ThreadPool one(1), three(3);
    const KernelSet& portable = find_kernel_set("portable")->set;
    size_t count = 0;
    const SetChoice* sets = kernel_sets(count);
    for (size_t i = 0; i < count; ++i) {
        if (!sets[i].available) {
            std::printf("%-9s not on this machine\n", sets[i].set.name);
            continue;
        }
        const Compute ours{three, sets[i].set}, theirs{one, portable};
        double worst = 0.0;
        for (const int type_id : kTypes) {
            FormatInfo info{};
            format_info(type_id, info);
            const int64_t widest = info.block_elements == 256 ? 512 : info.block_elements == 1 ? 263 : 320;
            for (const int64_t cols : {info.block_elements, widest}) {
                const double found = compare_products(ours, theirs, type_id, cols);
                worst = found > worst ? found : worst;
            }
            compare_panels(ours.set, portable, type_id);
            check_special(ours, type_id, widest);
        }
        double experts = 0.0;
        for (const ExpertActivation activation : {ExpertActivation::Silu, ExpertActivation::ClampedSilu,
                                                  ExpertActivation::Gelu, ExpertActivation::SquaredRelu,
                                                  ExpertActivation::LimitedSilu, ExpertActivation::Relu})
            for (const bool has_biases : {false, true})
                experts = std::max(experts, compare_experts(ours, theirs, activation, has_biases));
        double attended = 0.0;
        for (const Form form : {Form::Decode, Form::Prompt})
            attended = std::max({attended, compare_attention(ours, theirs, form), compare_latent(ours, theirs, form)});
        const double scores = std::max(compare_scores(ours, theirs), compare_routes(ours, theirs));
        const double streams = std::max({compare_streams(ours, theirs), compare_pools(ours, theirs), compare_selective(ours, theirs)});
        check_callers(ours);
        std::printf("%-9s products within %.1e, experts within %.1e, attention within %.1e, scores within %.1e, streams, pools and states "
                    "within %.1e of portable\n",
                    sets[i].set.name, worst, experts, attended, scores, streams);
    }
    for (size_t i = 0; i < count; ++i)
        for (const int type_id : kTypes)
            if (sets[i].available) compare_asking(three, sets[i].set, type_id);
    if (g_failures > 0) std::printf("%d failures\n", g_failures);
    return g_failures > 0;
}
