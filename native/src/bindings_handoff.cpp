// Steps that a device and the CPU share, for Python: checks what it is given, then runs without the interpreter lock.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "layer_weights.h"
#include "thermocline/handoff.h"
#include "thermocline/relax.h"
#include "thermocline/step_graph.h"

namespace thermocline::python {
namespace {

using Patience = std::tuple<int64_t, int64_t>;

HandoffPatience patience_of(const Patience& nanoseconds) {
    const auto [idle, busy] = nanoseconds;
    require(idle > 0 && busy > 0, "waiting takes time");
    return {idle, busy};
}

struct Page {
    HandoffPage page;

    Page(int64_t layers, int64_t rows, int64_t chosen, int64_t hidden) : page(checked(layers, rows, chosen, hidden)) {}

    static HandoffShape checked(int64_t layers, int64_t rows, int64_t chosen, int64_t hidden) {
        constexpr int64_t kMost = 1 << 19, kMostBytes = int64_t{1} << 32;  // products of three fit, and so does memory
        for (const int64_t size : {layers, rows, chosen, hidden})
            require(size > 0 && size <= kMost, "a page has layers, rows, choices and numbers, at most 2^19 of each");
        const HandoffShape shape{layers, rows, chosen, hidden};
        require(HandoffLayout(shape).bytes <= kMostBytes, "a page has at most 4 GiB");
        return shape;
    }
    void require_layer(int64_t layer) const {
        require(layer >= 0 && layer < page.shape().layers, "there is no such layer");
    }
    void require_epoch(uint32_t epoch) const { require(epoch != 0, "a step's epoch is not 0"); }
    void require_rows(int64_t rows) const {
        require(rows > 0 && rows <= page.shape().rows, "a step has 1 to all rows of the page");
    }
};

using PagePtr = std::shared_ptr<Page>;

auto memory(const PagePtr& page) {
    const auto bytes = static_cast<size_t>(page->page.layout().bytes);
    auto* kept = new PagePtr(page);
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<PagePtr*>(p); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(page->page.memory(), {bytes}, owner);
}

std::map<std::string, int64_t> layout(const Page& page) {
    const HandoffLayout& at = page.page.layout();
    return {{"abort", at.abort},   {"busy", at.busy}, {"begun", at.begun}, {"ended", at.ended},
            {"published", at.published}, {"served", at.served},
            {"x", at.x},           {"cold", at.cold}, {"weights", at.weights},     {"place", at.place},
            {"out", at.out},       {"ids", at.ids},   {"routing", at.routing}};
}

int64_t publish_layer(Page& page, int64_t layer, uint32_t epoch, In<float, 2> x, In<int32_t, 2> ids,
                      In<float, 2> weights, In<int32_t, 2> slots) {
    const HandoffShape& shape = page.page.shape();
    page.require_layer(layer);
    page.require_epoch(epoch);
    page.require_rows(size(x, 0));
    require(size(x, 1) == shape.hidden, "x must be [rows, hidden]");
    for (const int64_t axis : {0, 1}) {
        const int64_t wanted = axis == 0 ? size(x, 0) : shape.chosen;
        require(size(ids, axis) == wanted && size(weights, axis) == wanted && size(slots, axis) == wanted,
                "ids, weights and slots must be [rows, chosen]");
    }
    const WithoutGil unlocked;
    return publish(page.page, layer, epoch, {x.data(), ids.data(), weights.data(), slots.data(), size(x, 0)});
}

void begin_step(Page& page, uint32_t epoch) {
    page.require_epoch(epoch);
    page.page.begun_flag().store(epoch, std::memory_order_release);
}

void end_step(Page& page, uint32_t epoch) {
    page.require_epoch(epoch);
    page.page.ended_flag().store(epoch, std::memory_order_release);
}

void give_up(Page& page, uint32_t epoch) {
    page.require_epoch(epoch);
    abort_step(page.page, epoch);
}

int wait_for_cpu(Page& page, int64_t layer, uint32_t epoch, const Patience& patience) {
    page.require_layer(layer);
    page.require_epoch(epoch);
    const HandoffPatience nanoseconds = patience_of(patience);
    const WithoutGil unlocked;
    return static_cast<int>(wait_served(page.page, layer, epoch, nanoseconds));
}

// The CPU's side: its threads, and the experts of all layers.
class Server {
   public:
    Server(nb::handle_t<Core> core, PagePtr page, std::vector<const LayerWeights*> layers)
        : kept_(nb::borrow(core)), core_(nb::cast<Core&>(kept_)), page_(std::move(page)) {
        const HandoffShape& shape = page_->page.shape();
        require(static_cast<int64_t>(layers.size()) == shape.layers, "the page has as many layers as the model");
        for (const LayerWeights* weights : layers) {
            require(weights != nullptr, "a layer is missing");
            const Layer& layer = weights->layer();
            stacks_.push_back({});
            weights_.push_back(*weights);
            if (!layer.is_routed) continue;
            require(layer.router.rule.chosen == shape.chosen && layer.hidden == shape.hidden,
                    "the page has the sizes of the layers");
            stacks_.back() = {layer.router.matrix.rows, layer.experts};
        }
    }

    int serve(int64_t rows, uint32_t epoch, const Patience& patience, Write<int64_t, 2> spans) {
        static_assert(sizeof(ServedSpan) == 2 * sizeof(int64_t));
        page_->require_rows(rows);
        page_->require_epoch(epoch);
        require(size(spans, 0) == page_->page.shape().layers && size(spans, 1) == 2, "spans must be [layers, 2]");
        const HandoffPatience nanoseconds = patience_of(patience);
        const WithoutGil unlocked;
        return static_cast<int>(serve_step(core_.compute(), page_->page, stacks_.data(), rows, epoch, nanoseconds,
                                           reinterpret_cast<ServedSpan*>(spans.data())));
    }

    int finish(uint32_t epoch, const Patience& patience) {
        page_->require_epoch(epoch);
        const HandoffPatience nanoseconds = patience_of(patience);
        const WithoutGil unlocked;
        return static_cast<int>(wait_ended(page_->page, epoch, nanoseconds));
    }

   private:
    nb::object kept_;
    Core& core_;
    PagePtr page_;
    std::vector<LayerWeights> weights_;
    std::vector<ExpertStacks> stacks_;
};

// A layer of a graph with what it computes with, checked and kept alive.
class DeviceLayer {
   public:
    DeviceLayer(const LayerWeights& weights, std::optional<Experts> slots, int64_t rope, int64_t places)
        : weights_(weights), slots_(std::move(slots)) {
        require(rope >= 0 && rope < 1024 && places >= 0 && places < 1024, "a layer's tables and places count from 0");
        require(!weights_.layer().embedding.exists, "no graph computes a layer's embeddings of tokens");
        given_.rope = rope;
        given_.places = places;
        if (!slots_) return;
        const Layer& layer = weights_.layer();
        require(layer.is_routed, "a layer without routed experts has no slots");
        require(slots_->up.cols() == layer.hidden && slots_->up.rows() == layer.experts.up.first.rows,
                "a slot has the sizes of an expert");
        require(slots_->stacked.activation == layer.experts.activation &&
                    slots_->biases.empty() == (layer.experts.down_bias.first == nullptr),
                "a slot has the formula of an expert");
        given_.slots = {slots_->up.size(), slots_->stacked};
    }

    void attends(int type, int64_t block_tokens, int64_t head_dim, Write<uint8_t, 3> keys, Write<uint8_t, 3> values) {
        if (weights_.layer().is_latent) {
            const LatentPart& part = weights_.latent().part();
            require(head_dim == part.kv.rows, "a latent row has a number per row of kv");
            given_.cache = {latent_shape(type, block_tokens, head_dim, part.latent(), keys), keys.data(), keys.data()};
        } else {
            const CacheShape shape = cache_shape(type, block_tokens, head_dim, keys, values);
            weights_.attention().require_heads(shape);
            given_.cache = {shape, keys.data(), values.data()};
        }
        arrays_ = {keys, values};
    }
    void recurs(ConvStates conv_states, States states) {
        require_states(weights_.state(), conv_states, states);
        given_.conv_states = conv_states.data();
        given_.states = states.data();
        num_states_ = size(conv_states, 0);
        conv_ = std::move(conv_states);
        recurrent_ = std::move(states);
    }

    GraphLayer given() const {
        const int has_memory = (given_.cache.keys != nullptr) + (given_.conv_states != nullptr);
        require(has_memory == (weights_.has_mixer() ? 1 : 0), "a layer with a mixer attends or recurs");
        GraphLayer layer = given_;
        layer.layer = &weights_.layer();
        return layer;
    }
    const LayerWeights& weights() const { return weights_; }
    int64_t num_states() const { return num_states_; }

   private:
    LayerWeights weights_;
    std::optional<Experts> slots_;
    GraphLayer given_{};
    std::vector<Write<uint8_t, 3>> arrays_;
    std::optional<ConvStates> conv_;
    std::optional<States> recurrent_;
    int64_t num_states_ = 0;
};

class Graph {
   public:
    Graph(nb::handle_t<Core> core, PagePtr page, const std::vector<std::shared_ptr<DeviceLayer>>& layers, double bytes_per_s)
        : kept_(nb::borrow(core)), page_(std::move(page)) {
        const HandoffShape& shape = page_->page.shape();
        require(static_cast<int64_t>(layers.size()) == shape.layers, "the page has as many layers as the model");
        require(bytes_per_s >= 1, "the link moves at least a byte per second");
        std::vector<GraphLayer> given;
        for (const auto& layer : layers) {
            require(layer != nullptr, "a layer is missing");
            layers_.push_back(std::make_shared<DeviceLayer>(*layer));  // what it computes with stays, whatever is set later
            given.push_back(layers_.back()->given());
            const Layer& weights = *given.back().layer;
            require(weights.hidden == shape.hidden && (!weights.is_routed || weights.router.rule.chosen == shape.chosen),
                    "the page has the sizes of the layers");
            ropes_ = std::max(ropes_, given.back().rope + 1);
            places_ = std::max(places_, given.back().places + 1);
        }
        auto& owner = nb::cast<Core&>(kept_);
        graph_ = std::make_unique<StepGraph>(owner.compute(), owner.dense(), page_->page, std::move(given), 1e9 / bytes_per_s);
    }

    // One step at a time: the graph's memory is that of a step. Called with the interpreter lock.
    class Running {
       public:
        Running(Graph& graph, uint32_t epoch) : graph_(graph) {
            require(!graph.is_running_, "the graph computes a step already");
            graph.is_running_ = true;
            graph.epoch_ = epoch;
        }
        ~Running() { graph_.is_running_ = false; }
        Running(const Running&) = delete;
        Running& operator=(const Running&) = delete;

       private:
        Graph& graph_;
    };

    StepGraph& graph() { return *graph_; }
    Page& page() { return *page_; }
    int64_t num_nodes() const { return graph_->num_nodes(); }
    void output(Out<2> out) const {
        const HandoffShape& shape = page_->page.shape();
        require_ended();
        page_->require_rows(size(out, 0));
        require(size(out, 1) == shape.hidden, "out must be [rows, hidden]");
        std::copy_n(graph_->output(), size(out, 0) * shape.hidden, out.data());
    }
    void spans(Write<int64_t, 2> out) const {
        static_assert(sizeof(NodeSpan) == 5 * sizeof(int64_t));
        require_ended();
        require(size(out, 0) == num_nodes() && size(out, 1) == 5, "out must be [nodes, 5]");
        std::copy_n(reinterpret_cast<const int64_t*>(graph_->spans().data()), 5 * num_nodes(), out.data());
    }
    // A step that has ended leaves its output and spans alone, though its thread may still wait for the interpreter lock.
    void require_ended() const {
        require(!is_running_ || page_->page.ended_flag().load(std::memory_order_acquire) == epoch_,
                "the graph computes a step");
    }
    // Every layer must find what the step gives, within its own cache and slots.
    void require_inputs(const GraphInputs& inputs) const {
        require(static_cast<int64_t>(inputs.ropes.size()) >= ropes_ && static_cast<int64_t>(inputs.places.size()) >= places_,
                "every layer has its tables and places");
        for (size_t n = 0; n < layers_.size(); ++n) {
            const GraphLayer layer = layers_[n]->given();
            if (layer.conv_states != nullptr) {
                require(!inputs.runs.empty(), "a recurrent layer has runs");
                for (size_t r = 0; r < inputs.runs.size(); ++r)
                    require(inputs.runs[r].slot < layers_[n]->num_states() &&
                                inputs.copies[r] < layers_[n]->num_states(),
                            "a slot lies beyond the states");
            } else if (layer.cache.keys != nullptr) {
                require_places(layer.cache.shape, inputs, inputs.places[static_cast<size_t>(layer.places)]);
                const auto& rope = inputs.ropes[static_cast<size_t>(layer.rope)];
                const int64_t turned = layer.cache.shape.head_dim - layer.cache.shape.latent;
                require(layer.layer->is_latent ? rope.rotary_dims == turned : rope.rotary_dims <= turned,
                        "rotary_dims must be at most head_dim, and what lies behind the value of a latent row");
            }
            if (!layer.layer->is_routed) continue;
            require(layer.layer->router.matrix.rows <= inputs.experts, "residency has a column for each expert");
            const int32_t* row = inputs.residency + static_cast<int64_t>(n) * inputs.experts;
            for (int64_t e = 0; e < inputs.experts; ++e)
                require(row[e] < layer.slots.count, "an expert lies beyond the slots");
        }
    }

   private:
    static void require_places(const CacheShape& cache, const GraphInputs& inputs, const GraphPlaces& places) {
        require_below(places.slots, inputs.rows, cache.num_blocks * cache.block_tokens, "a slot lies beyond the cache");
        for (int64_t s = 0; s < places.sequences; ++s) {
            const int64_t first = places.starts[s], tokens = places.starts[s + 1] - first;
            const int64_t table = places.table_starts[s], blocks = places.table_starts[s + 1] - table;
            require_below(places.block_tables + table, blocks, cache.num_blocks, "a block lies beyond the cache");
            require_below(inputs.positions + first, tokens, blocks * cache.block_tokens,
                          "a position lies beyond the block table");
        }
    }

    nb::object kept_;
    PagePtr page_;
    std::vector<std::shared_ptr<DeviceLayer>> layers_;
    int64_t ropes_ = 0, places_ = 0;
    bool is_running_ = false;
    uint32_t epoch_ = 0;  // of the last step
    std::unique_ptr<StepGraph> graph_;
};

using RopeArrays = std::tuple<In<float, 2>, In<float, 2>, bool>;
using PlaceArrays = std::tuple<In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 1>>;

// A step's arrays, kept alive, and what the graph reads of them.
struct Step {
    In<float, 2> x;
    In<int32_t, 1> positions;
    std::vector<RopeArrays> ropes;
    std::vector<PlaceArrays> places;
    In<int32_t, 2> residency;
    GraphInputs inputs{};

    Step(In<float, 2> rows, In<int32_t, 1> at, std::vector<RopeArrays> tables, std::vector<PlaceArrays> caches,
         In<int32_t, 2> runs, In<int32_t, 2> slots)
        : x(std::move(rows)), positions(std::move(at)), ropes(std::move(tables)), places(std::move(caches)),
          residency(std::move(slots)) {
        const int64_t count = size(x, 0);
        inputs.rows = count;
        inputs.x = x.data();
        inputs.positions = positions.data();
        inputs.residency = residency.data();
        inputs.experts = size(residency, 1);
        require(size(positions, 0) == count, "positions must have one entry per token");
        for (const auto& [cosines, sines, pairs] : ropes) {
            require_rotary(cosines, sines, size(cosines, 0), 1 << 20);
            require_below(positions.data(), count, size(cosines, 0), "a position lies beyond the rotary table");
            inputs.ropes.push_back({cosines.data(), sines.data(), size(cosines, 0), 2 * size(cosines, 1),
                                    pairs ? RopeLayout::Pairs : RopeLayout::Halves});
        }
        for (const auto& [own, starts, block_tables, table_starts] : places) {
            require(size(own, 0) == count, "slots must have one entry per token");
            require_spans(starts, count);
            require_spans(table_starts, size(block_tables, 0));
            require(size(table_starts, 0) == size(starts, 0), "starts and table_starts differ in length");
            inputs.places.push_back(
                {own.data(), starts.data(), block_tables.data(), table_starts.data(), size(starts, 0) - 1});
        }
        require(size(runs, 1) == 4, "runs must be [runs, 4]");
        int64_t end = 0;
        for (int64_t r = 0; r < size(runs, 0); ++r) {
            const int32_t* row = runs.data() + 4 * r;
            require(row[0] == end && row[1] > 0, "runs must follow each other");
            require(row[2] >= 0 && row[3] >= -1, "a slot lies beyond the states");
            end += row[1];
            inputs.runs.push_back({row[0], row[1], row[2]});
            inputs.copies.push_back(row[3]);
        }
        require(end == count || end == 0, "the runs must cover all tokens");
    }
};

// The CPU's side goes on in Python when the device is done, and somebody waits for it: it gets the interpreter lock
// first. What is left to do here has time until the lane computes again.
void let_others_go_on() {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (auto now = begin; now < begin + std::chrono::milliseconds(1); now = Clock::now()) {
        if (now > begin + std::chrono::microseconds(40) && lanes_in_python.load(std::memory_order_acquire) == 0) return;
        relax();
    }
}

int run_graph(Graph& graph, uint32_t epoch, const Patience& patience, In<float, 2> x, In<int32_t, 1> positions,
              std::vector<RopeArrays> ropes, std::vector<PlaceArrays> places, In<int32_t, 2> runs,
              In<int32_t, 2> residency) {
    const HandoffShape& shape = graph.page().page.shape();
    graph.page().require_epoch(epoch);
    graph.page().require_rows(size(x, 0));
    require(size(x, 1) == shape.hidden, "x must be [rows, hidden]");
    require(size(residency, 0) == shape.layers, "residency must be [layers, experts]");
    const Step step(std::move(x), std::move(positions), std::move(ropes), std::move(places), std::move(runs),
                    std::move(residency));
    graph.require_inputs(step.inputs);
    const HandoffPatience nanoseconds = patience_of(patience);
    const Graph::Running running(graph, epoch);
    const WithoutGil unlocked;
    const auto end = static_cast<int>(graph.graph().run(step.inputs, epoch, nanoseconds));
    let_others_go_on();
    return end;
}

}  // namespace

void bind_handoff(nb::module_& m) {
    nb::class_<Page>(m, "HandoffPage", "Memory that a device and the CPU share for the experts of decode steps.")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t>(), nb::arg("layers"), nb::arg("rows"), nb::arg("chosen"),
             nb::arg("hidden"))
        .def_prop_ro("memory", &memory, nb::rv_policy::automatic, "All of it, uint8.")
        .def_prop_ro("layout", &layout, "Where each part begins, in bytes; see handoff.h.")
        .def("publish", &publish_layer, nb::arg("layer"), nb::arg("epoch"), nb::arg("x").noconvert(),
             nb::arg("ids").noconvert(), nb::arg("weights").noconvert(), nb::arg("slots").noconvert(),
             "The device's side: hand over the pairs whose slot is below zero; their number.")
        .def("wait", &wait_for_cpu, nb::arg("layer"), nb::arg("epoch"), nb::arg("patience"),
             "The device's side: wait until the CPU has served the layer. 0: it has; 1: the step was given up; 2: it is\n"
             "now, after `patience`: nanoseconds for a CPU that does not compute, and for one that does.")
        .def("begin", &begin_step,
             nb::arg("epoch"), "The device's side: say that it computes the step now.")
        .def("end", &end_step,
             nb::arg("epoch"), "The device's side: say that it is done.")
        .def("abort", &give_up, nb::arg("epoch"),
             "Give up a step, so that neither side waits any more.");
    nb::class_<Server>(m, "HandoffServer", "The CPU's side of decode steps.")
        .def(nb::init<nb::handle_t<Core>, PagePtr, std::vector<const LayerWeights*>>(), nb::arg("core"), nb::arg("page"),
             nb::arg("layers"))
        .def("serve", &Server::serve, nb::arg("rows"), nb::arg("epoch"), nb::arg("patience"),
             nb::arg("spans").noconvert(),
             "Compute what the device publishes, layer after layer. Returns as `HandoffPage.wait`, and 3 for a page that\n"
             "makes no sense. spans [layers, 2]: when each layer was seen and served, in ns of CLOCK_MONOTONIC.")
        .def("finish", &Server::finish, nb::arg("epoch"), nb::arg("patience"),
             "Wait until the device is done; returns as `HandoffPage.wait`.");
    nb::class_<DeviceLayer>(m, "GraphLayer", "A layer with slots for experts, as a simulated device computes it.")
        .def(nb::init<const LayerWeights&, std::optional<Experts>, int64_t, int64_t>(), nb::arg("weights"),
             nb::arg("slots").none(), nb::arg("rope"), nb::arg("places"))
        .def("attends", &DeviceLayer::attends, nb::arg("cache_type"), nb::arg("block_tokens"), nb::arg("head_dim"),
             nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
             "Set its cache; values are not looked at where attention is latent.")
        .def("recurs", &DeviceLayer::recurs, nb::arg("conv_states").noconvert(), nb::arg("states").noconvert(),
             "Set its states.");
    nb::class_<Graph>(m, "StepGraph", "A decode step through all layers, recorded as nodes.")
        .def(nb::init<nb::handle_t<Core>, PagePtr, const std::vector<std::shared_ptr<DeviceLayer>>&, double>(), nb::arg("core"),
             nb::arg("page"), nb::arg("layers"), nb::arg("bytes_per_s"))
        .def_prop_ro("num_nodes", &Graph::num_nodes)
        .def("output", &Graph::output, nb::arg("out").noconvert(), "Copy x [rows, hidden] behind the last layer.")
        .def("run", &run_graph, nb::arg("epoch"), nb::arg("patience"), nb::arg("x").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("ropes"), nb::arg("places"), nb::arg("runs").noconvert(),
             nb::arg("residency").noconvert(),
             "Compute a step; returns as `HandoffPage.wait`. ropes: (cosines, sines, pairs) by position; places: (slots,\n"
             "starts, block_tables, table_starts); runs [runs, 4] as for run_recurrent_layer, none without recurrent layers; residency\n"
             "int32 [layers, experts].")
        .def("spans", &Graph::spans, nb::arg("out").noconvert(),
             "Of the last step: begin and end of each node in ns of CLOCK_MONOTONIC, its kind, its layer, and the pairs\n"
             "that it computed or waited for.");
}

}  // namespace thermocline::python
