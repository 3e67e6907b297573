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

#include "bindings_step.h"
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

class Graph {
   public:
    Graph(nb::handle_t<Core> core, PagePtr page, const PlacedLayers& layers, double bytes_per_s)
        : kept_(nb::borrow(core)), page_(std::move(page)) {
        const HandoffShape& shape = page_->page.shape();
        require(static_cast<int64_t>(layers.size()) == shape.layers, "the page has as many layers as the model");
        require(bytes_per_s >= 1, "the link moves at least a byte per second");
        std::vector<PlacedLayer> given;
        for (const auto& layer : layers) {
            require(layer != nullptr, "a layer is missing");
            require(!layer->weights().layer().embedding.exists, "no graph computes a layer's embeddings of tokens");
            layers_.push_back(std::make_shared<PlacedWeights>(*layer));  // what it computes with stays, whatever is set later
            given.push_back(layers_.back()->given());
            const Layer& weights = *given.back().layer;
            require(weights.hidden == shape.hidden && (!weights.is_routed || weights.router.rule.chosen == shape.chosen),
                    "the page has the sizes of the layers");
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
    void require_inputs(const GraphInputs& inputs) const {
        require_step(layers_, inputs);
        for (size_t n = 0; n < layers_.size(); ++n) {
            const PlacedLayer layer = layers_[n]->given();
            if (!layer.layer->is_routed) continue;
            require(layer.layer->router.matrix.rows <= inputs.experts, "residency has a column for each expert");
            const int32_t* row = inputs.residency + static_cast<int64_t>(n) * inputs.experts;
            for (int64_t e = 0; e < inputs.experts; ++e)
                require(row[e] < layer.slots.count, "an expert lies beyond the slots");
        }
    }

   private:
    nb::object kept_;
    PagePtr page_;
    PlacedLayers layers_;
    bool is_running_ = false;
    uint32_t epoch_ = 0;  // of the last step
    std::unique_ptr<StepGraph> graph_;
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
    const StepArrays arrays(std::move(x), std::move(positions), std::move(ropes), std::move(places), runs, std::nullopt);
    const GraphInputs inputs{arrays.inputs, residency.data(), size(residency, 1)};
    graph.require_inputs(inputs);
    const HandoffPatience nanoseconds = patience_of(patience);
    const Graph::Running running(graph, epoch);
    const WithoutGil unlocked;
    const auto end = static_cast<int>(graph.graph().run(inputs, epoch, nanoseconds));
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
    nb::class_<Graph>(m, "StepGraph", "A decode step through all layers, recorded as nodes.")
        .def(nb::init<nb::handle_t<Core>, PagePtr, const PlacedLayers&, double>(), nb::arg("core"),
             nb::arg("page"), nb::arg("layers"), nb::arg("bytes_per_s"))
        .def_prop_ro("num_nodes", &Graph::num_nodes)
        .def("output", &Graph::output, nb::arg("out").noconvert(), "Copy x [rows, hidden] behind the last layer.")
        .def("run", &run_graph, nb::arg("epoch"), nb::arg("patience"), nb::arg("x").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("ropes"), nb::arg("places"), nb::arg("runs").noconvert(),
             nb::arg("residency").noconvert(),
             "Compute a step; returns as `HandoffPage.wait`. ropes: (cosines, sines, pairs) by position; places: (slots,\n"
             "starts, block_tables, table_starts, expanded); runs [runs, 4] as for run_recurrent_layer, none without recurrent\n"
             "layers; residency int32 [layers, experts].")
        .def("spans", &Graph::spans, nb::arg("out").noconvert(),
             "Of the last step: begin and end of each node in ns of CLOCK_MONOTONIC, its kind, its layer, and the pairs\n"
             "that it computed or waited for.");
}

}  // namespace thermocline::python
