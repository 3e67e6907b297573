// Runs recorded decode steps on a device's thread against the CPU's side, with residency that changes between steps, and
// compares their bits with layer after layer on the CPU. Then steps that are given up.
#include <array>
#include <cstring>
#include <memory>

#include "stress_support.h"
#include "thermocline/step_graph.h"

namespace thermocline::stress {
namespace {

constexpr int64_t kRows = 8, kChosen = 2, kHidden = 32, kInner = 16, kExperts = 6, kHeadDim = 16, kBlock = 8;
constexpr int64_t kLayers = 3, kDense = 1;  // the second has no routed experts
constexpr int64_t kPositions = 2 * kBlock;  // of each sequence, two blocks
constexpr int64_t kLong = 60'000'000'000;
constexpr HandoffPatience kPatient{kLong, kLong};

// A layer with two heads that share a key head.
struct ToyLayer {
    std::vector<float> norm;
    FloatMatrix q, k, v, output, router;
    ToyExperts experts, shared;
    Layer layer{};

    ToyLayer(Random& random, bool is_routed)
        : norm(kHidden, 1.0f), q(random, 1, 2 * kHeadDim, kHidden), k(random, 1, kHeadDim, kHidden),
          v(random, 1, kHeadDim, kHidden), output(random, 1, kHidden, 2 * kHeadDim), router(random, 1, kExperts, kHidden),
          experts(random, kExperts, kHidden, kInner), shared(random, 1, kHidden, kInner) {
        layer.hidden = kHidden;
        AttentionPart& part = layer.attention;
        part.norm = norm.data();
        part.q = q.weight();
        part.k = k.weight();
        part.v = v.weight();
        part.output = output.weight();
        part.epsilon = layer.epsilon = 1e-5f;
        part.scale = 0.25f;
        layer.norm = norm.data();
        layer.is_routed = is_routed;
        if (is_routed) {
            layer.router = {router.weight(), {kChosen, Gating::Softmax, nullptr, nullptr, 1, 1, 1, true, 0.0f, 1.0f}};
            layer.experts.gate = experts.gate.stack();
            layer.experts.up = experts.up.stack();
            layer.experts.down = experts.down.stack();
        }
        layer.shared = {true, false, {shared.gate.weight(), shared.up.weight(), shared.down.weight()}, {}};
    }
};

// The keys and values of all layers.
class Cache {
   public:
    Cache() {
        for (auto& bytes : numbers_) bytes.assign(static_cast<size_t>(2 * kRows * kBlock * kHeadDim), 0.0f);
    }
    LayerCacheView view(int64_t layer) {
        const auto bytes = [&](int64_t at) { return reinterpret_cast<uint8_t*>(numbers_[static_cast<size_t>(at)].data()); };
        return {{CacheType::F32, 2 * kRows, kBlock, 1, kHeadDim}, bytes(2 * layer), bytes(2 * layer + 1)};
    }
    bool operator==(const Cache& other) const { return numbers_ == other.numbers_; }

   private:
    std::array<std::vector<float>, 2 * kLayers> numbers_;
};

void add_turns(int64_t position, std::vector<float>& cosines, std::vector<float>& sines) {
    for (int64_t i = 0; i < kHeadDim / 2; ++i) {
        cosines.push_back(std::cos(static_cast<float>(position * (i + 1))));
        sines.push_back(std::sin(static_cast<float>(position * (i + 1))));
    }
}

// One token each of some sequences, all at the same position.
struct Tokens {
    std::vector<float> x, cosines, sines, all_cosines, all_sines;  // of the rows; of all positions
    std::vector<int32_t> positions, slots, starts, tables, table_starts;
    int64_t rows;

    Tokens(Random& random, int64_t count, int64_t position) : rows(count) {
        starts.push_back(0);
        table_starts.push_back(0);
        for (int32_t t = 0; t < count; ++t) {
            const int32_t blocks[] = {2 * t + 1, 2 * t};
            positions.push_back(static_cast<int32_t>(position));
            slots.push_back(static_cast<int32_t>(blocks[position / kBlock] * kBlock + position % kBlock));
            starts.push_back(t + 1);
            tables.insert(tables.end(), blocks, blocks + 2);
            table_starts.push_back(2 * t + 2);
            for (int64_t i = 0; i < kHidden; ++i) x.push_back(random.number());
            add_turns(position, cosines, sines);
        }
        for (int64_t at = 0; at < kPositions; ++at) add_turns(at, all_cosines, all_sines);
    }
    LayerTokens of_layer() const {
        return {rows, positions.data(), slots.data(), cosines.data(), sines.data(), kHeadDim, RopeLayout::Halves,
                starts.data(), tables.data(), table_starts.data(), rows};
    }
    GraphInputs inputs(const std::vector<int32_t>& residency) const {
        return {{rows, x.data(), positions.data(), {{all_cosines.data(), all_sines.data(), kPositions, kHeadDim, RopeLayout::Halves}},
                {{slots.data(), starts.data(), tables.data(), table_starts.data(), rows}}, {}, {}}, residency.data(), kExperts};
    }
};

// A model on the CPU and on a device that holds some experts in slots.
class Pair {
   public:
    explicit Pair(const KernelSet& set) : compute_{pool_, set}, dense_{*set.dense, pool_}, own_{own_pool_, set}, own_dense_{*set.dense, own_pool_} {
        for (int64_t l = 0; l < kLayers; ++l) {
            layers_.push_back(std::make_unique<ToyLayer>(random_, l != kDense));
            slots_.push_back(std::make_unique<ToyExperts>(random_, kExperts, kHidden, kInner));
            stacks_.push_back(l != kDense ? layers_.back()->experts.stacks() : ExpertStacks{});
        }
        residency_.assign(kLayers * kExperts, -1);
        record();
    }

    // A device with a page of its own. It has threads of its own, or those of the CPU.
    void record(bool is_own = true) {
        std::vector<PlacedLayer> given;
        for (int64_t l = 0; l < kLayers; ++l) {
            const auto n = static_cast<size_t>(l);
            given.push_back({&layers_[n]->layer, device_cache_.view(l), nullptr, nullptr, 0, 0,
                             l != kDense ? slots_[n]->stacks() : ExpertStacks{}});
        }
        page_ = std::make_unique<HandoffPage>(HandoffShape{kLayers, kRows, kChosen, kHidden});
        graph_ = std::make_unique<StepGraph>(is_own ? own_ : compute_, is_own ? own_dense_ : dense_, *page_, given, 0.1);
    }

    // Promotes and evicts between steps. percent: of the experts that the device holds.
    void change_residency(int64_t percent) {
        for (int64_t l = 0; l < kLayers; ++l) {
            std::array<int32_t, kExperts> free{0, 1, 2, 3, 4, 5};
            for (size_t s = free.size(); s > 1; --s)
                std::swap(free[s - 1], free[static_cast<size_t>(random_.below(static_cast<int64_t>(s)))]);
            for (int64_t e = 0; e < kExperts; ++e) {
                int32_t& slot = residency_[static_cast<size_t>(l * kExperts + e)];
                slot = random_.below(100) < percent ? free[static_cast<size_t>(e)] : -1;
                if (slot < 0) continue;
                ToyExperts &from = layers_[static_cast<size_t>(l)]->experts, &to = *slots_[static_cast<size_t>(l)];
                copy(from.gate, e, to.gate, slot);
                copy(from.up, e, to.up, slot);
                copy(from.down, e, to.down, slot);
            }
        }
    }

    void step(int64_t number) {
        constexpr int64_t kPercents[] = {0, 51, 100};
        change_residency(kPercents[random_.below(3)]);
        const Tokens tokens(random_, 1 + random_.below(kRows), number % kPositions);
        const GraphInputs inputs = tokens.inputs(residency_);
        HandoffEnd device_end = HandoffEnd::BadPage;
        device_.launch([&] {
            device_end = graph_->run(inputs, epoch_, kPatient);
        });
        random_.delay();
        HandoffEnd end = serve(tokens.rows, kPatient);
        if (end == HandoffEnd::Done) end = wait_ended(*page_, epoch_, kPatient);
        device_.drain();
        expect(end == HandoffEnd::Done && device_end == HandoffEnd::Done, "a graph's step is lost", number);
        check(number, tokens);
        epoch_ = next_epoch(epoch_);
    }

    // Steps that end early leave a device that goes on with a new page and graph.
    void lose(int64_t number) {
        change_residency(0);
        const Tokens tokens(random_, 1, 0);
        const GraphInputs inputs = tokens.inputs(residency_);
        HandoffEnd device_end = HandoffEnd::Done;
        const bool has_server = number % 2 == 0;
        // Without a server, the device gives up by itself. With one, somebody else does, at any time.
        const HandoffPatience patience{has_server ? kLong : 20'000, kLong};
        device_.launch([&] { device_end = graph_->run(inputs, epoch_, patience); });
        if (has_server) {
            std::thread other([&] { abort_step(*page_, epoch_); });
            HandoffEnd end = serve(tokens.rows, kPatient);
            if (end == HandoffEnd::Done) end = wait_ended(*page_, epoch_, kPatient);
            other.join();
            device_.drain();
            expect(end == HandoffEnd::Aborted || (end == HandoffEnd::Done && device_end == HandoffEnd::Done),
                   "an aborted step ends oddly", number, static_cast<int64_t>(end));
        } else {
            device_.drain();
            expect(device_end == HandoffEnd::Late, "a device without a server is not late", number);
        }
        epoch_ = next_epoch(epoch_);
        record(number % 4 < 2);
    }

   private:
    static void copy(FloatMatrix& from, int64_t expert, FloatMatrix& to, int64_t slot) {
        std::memcpy(to.expert(slot), from.expert(expert), static_cast<size_t>(from.size()) * sizeof(float));
    }

    HandoffEnd serve(int64_t rows, const HandoffPatience& patience) {
        std::array<ServedSpan, kLayers> spans{};
        return serve_step(compute_, *page_, stacks_.data(), rows, epoch_, patience, spans.data());
    }

    // The same tokens layer after layer, with a cache of their own.
    void check(int64_t number, const Tokens& tokens) {
        std::vector<float> x = tokens.x, out(x.size());
        bool has_log = true;
        for (int64_t l = 0; l < kLayers; ++l) {
            std::vector<int32_t> ids(static_cast<size_t>(tokens.rows * kChosen));
            std::vector<float> weights(ids.size());
            run_layer(compute_, dense_, Form::Decode, layers_[static_cast<size_t>(l)]->layer, tokens.of_layer(),
                      cache_.view(l), x.data(), out.data(), ids.data(), weights.data(), {});
            x.swap(out);
            if (l == kDense) continue;
            has_log = has_log && std::equal(ids.begin(), ids.end(), page_->ids(l)) &&
                      std::equal(weights.begin(), weights.end(), page_->routing(l));
        }
        expect(has_log, "the log is not what the layers chose", number);
        expect(std::memcmp(x.data(), graph_->output(), x.size() * sizeof(float)) == 0, "the bits of a step differ", number);
        expect(cache_ == device_cache_, "the caches differ", number);
        check_whole_step(number, tokens, x);
        for (const float value : x)
            if (!std::isfinite(value)) return expect(false, "an output is not finite", number);
    }

    // All layers as one job of the CPU.
    void check_whole_step(int64_t number, const Tokens& tokens, const std::vector<float>& expected) {
        std::vector<PlacedLayer> placed;
        for (int64_t l = 0; l < kLayers; ++l)
            placed.push_back({&layers_[static_cast<size_t>(l)]->layer, whole_cache_.view(l), nullptr, nullptr, 0, 0, {}});
        std::vector<float> out(expected.size());
        std::vector<int32_t> ids(static_cast<size_t>((kLayers - 1) * tokens.rows * kChosen));
        std::vector<float> weights(ids.size());
        std::vector<StepSpan> spans(static_cast<size_t>(kLayers));
        run_step(compute_, dense_, placed, tokens.inputs(residency_), out.data(), ids.data(), weights.data(), spans.data());
        expect(out == expected, "the bits of a whole step differ", number);
        expect(whole_cache_ == cache_, "the cache of a whole step differs", number);
    }

    Random random_{21};
    ThreadPool pool_{1}, own_pool_{1};
    Compute compute_;
    Dense dense_;
    Compute own_;
    Dense own_dense_;
    std::vector<std::unique_ptr<ToyLayer>> layers_;
    std::vector<std::unique_ptr<ToyExperts>> slots_;
    std::vector<ExpertStacks> stacks_;
    std::vector<int32_t> residency_;
    Cache cache_, device_cache_, whole_cache_;
    std::unique_ptr<HandoffPage> page_;
    std::unique_ptr<StepGraph> graph_;
    uint32_t epoch_ = 0xffffffc0u;
    DeviceThread device_;
};

}  // namespace

void check_step_graph(int64_t steps) {
    Pair pair(find_kernel_set("portable")->set);
    int64_t lost = 0;
    for (int64_t n = 0; n < steps; ++n) {
        pair.step(n);
        // The next step begins with the same sequence and position, so that it writes the keys again.
        if (n % kPositions == kPositions - 1 && n % 5 == 0) pair.lose(lost++);
    }
    for (; lost < 8; ++lost) pair.lose(lost);
    std::printf("step graph %lld steps, bits equal, and %lld given up\n", static_cast<long long>(steps), static_cast<long long>(lost));
}

}  // namespace thermocline::stress
