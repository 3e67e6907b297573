// Steps through all layers for Python: checks what they are given, then runs without the interpreter lock.
#include "bindings_step.h"

namespace thermocline::python {

void PlacedWeights::attends(int type, int64_t block_tokens, int64_t head_dim, Write<uint8_t, 3> keys, Write<uint8_t, 3> values) {
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

void PlacedWeights::recurs(ConvStates conv_states, States states) {
    require_states(weights_.state(), conv_states, states);
    given_.conv_states = conv_states.data();
    given_.states = states.data();
    num_states_ = size(conv_states, 0);
    conv_ = std::move(conv_states);
    recurrent_ = std::move(states);
}

StepArrays::StepArrays(In<float, 2> rows, In<int32_t, 1> at, std::vector<RopeArrays> tables,
                       std::vector<PlaceArrays> caches, const In<int32_t, 2>& runs,
                       std::optional<In<float, 3>> embeddings)
    : x(std::move(rows)), positions(std::move(at)), ropes(std::move(tables)), places(std::move(caches)),
      embedded(std::move(embeddings)) {
    const int64_t count = size(x, 0);
    inputs.rows = count;
    inputs.x = x.data();
    inputs.positions = positions.data();
    require(size(positions, 0) == count, "positions must have one entry per token");
    for (const auto& [cosines, sines, pairs] : ropes) {
        require_rotary(cosines, sines, size(cosines, 0), 1 << 20);
        require_below(positions.data(), count, size(cosines, 0), "a position lies beyond the rotary table");
        inputs.ropes.push_back({cosines.data(), sines.data(), size(cosines, 0), 2 * size(cosines, 1),
                                pairs ? RopeLayout::Pairs : RopeLayout::Halves});
    }
    for (const auto& [own, starts, block_tables, table_starts, expanded] : places) {
        require(size(own, 0) == count, "slots must have one entry per token");
        require_spans(starts, count);
        require_spans(table_starts, size(block_tables, 0));
        require(size(table_starts, 0) == size(starts, 0), "starts and table_starts differ in length");
        require_expanded(expanded, starts);
        inputs.places.push_back({own.data(), starts.data(), block_tables.data(), table_starts.data(), size(starts, 0) - 1,
                                 expanded.data()});
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
    if (!embedded) return;
    require(size(*embedded, 1) == count, "embedded must be [layers, tokens, width]");
    inputs.embedded = embedded->data();
    inputs.embedded_width = size(*embedded, 2);
}

namespace {

void require_places(const CacheShape& cache, const StepInputs& inputs, const StepPlaces& places) {
    require_below(places.slots, inputs.rows, cache.num_blocks * cache.block_tokens, "a slot lies beyond the cache");
    for (int64_t s = 0; s < places.sequences; ++s) {
        const int64_t first = places.starts[s], tokens = places.starts[s + 1] - first;
        const int64_t table = places.table_starts[s], blocks = places.table_starts[s + 1] - table;
        require_below(places.block_tables + table, blocks, cache.num_blocks, "a block lies beyond the cache");
        require_below(inputs.positions + first, tokens, blocks * cache.block_tokens,
                      "a position lies beyond the block table");
    }
}

}  // namespace

void require_step(const PlacedLayers& layers, const StepInputs& inputs) {
    for (const auto& each : layers) {
        const PlacedLayer layer = each->given();
        if (layer.conv_states != nullptr) {
            require(!inputs.runs.empty(), "a recurrent layer has runs");
            for (size_t r = 0; r < inputs.runs.size(); ++r)
                require(inputs.runs[r].slot < each->num_states() && inputs.copies[r] < each->num_states(),
                        "a slot lies beyond the states");
        } else if (layer.cache.keys != nullptr) {
            require(layer.rope < static_cast<int64_t>(inputs.ropes.size()) &&
                        layer.places < static_cast<int64_t>(inputs.places.size()),
                    "every layer has its tables and places");
            require_places(layer.cache.shape, inputs, inputs.places[static_cast<size_t>(layer.places)]);
            const auto& rope = inputs.ropes[static_cast<size_t>(layer.rope)];
            const int64_t turned = layer.cache.shape.head_dim - layer.cache.shape.latent;
            require(layer.layer->is_latent ? rope.rotary_dims == turned : rope.rotary_dims <= turned,
                    "rotary_dims must be at most head_dim, and what lies behind the value of a latent row");
        }
    }
}

namespace {

// All layers of a model on the CPU.
class WholeStep {
   public:
    WholeStep(nb::handle_t<Core> core, const PlacedLayers& layers) : kept_(nb::borrow(core)) {
        require(!layers.empty(), "a model has layers");
        for (const auto& layer : layers) {
            require(layer != nullptr, "a layer is missing");
            layers_.push_back(std::make_shared<PlacedWeights>(*layer));  // whatever is set later
            given_.push_back(layers_.back()->given());
            const Layer& weights = *given_.back().layer;
            require(weights.hidden == given_.front().layer->hidden, "all layers have one hidden size");
            if (weights.embedding.exists) embedded_width_ = weights.embedding.gate.rows;
            if (!weights.is_routed) continue;
            require(chosen_ == 0 || chosen_ == weights.router.rule.chosen, "all layers choose as many experts");
            chosen_ = weights.router.rule.chosen;
            ++num_routed_;
        }
        for (const PlacedLayer& layer : given_)
            require(!layer.layer->embedding.exists || layer.layer->embedding.gate.rows == embedded_width_,
                    "all layers' embeddings have one width");
    }

    void run(In<float, 2> x, In<int32_t, 1> positions, std::vector<RopeArrays> ropes, std::vector<PlaceArrays> places,
             In<int32_t, 2> runs, std::optional<In<float, 3>> embedded, Out<2> out, Write<int32_t, 3> ids,
             Write<float, 3> weights, Write<int64_t, 2> spans) const {
        static_assert(sizeof(StepSpan) == 2 * sizeof(int64_t));
        const int64_t rows = size(x, 0), hidden = given_.front().layer->hidden;
        const auto layers = static_cast<int64_t>(given_.size());
        require(size(x, 1) == hidden && size(out, 0) == rows && size(out, 1) == hidden, "x and out must be [tokens, hidden]");
        require(size(ids, 0) == num_routed_ && size(ids, 1) == rows && size(ids, 2) == chosen_ &&
                    size(weights, 0) == num_routed_ && size(weights, 1) == rows && size(weights, 2) == chosen_,
                "ids and weights must be [layers with experts, tokens, chosen]");
        require(size(spans, 0) == layers && size(spans, 1) == 2, "spans must be [layers, 2]");
        const StepArrays arrays(std::move(x), std::move(positions), std::move(ropes), std::move(places), runs,
                                std::move(embedded));
        require(arrays.embedded.has_value() == (embedded_width_ > 0) && arrays.inputs.embedded_width == embedded_width_ &&
                    (!arrays.embedded || size(*arrays.embedded, 0) == layers),
                "embedded must be [layers, tokens, width of the layers' embeddings], where they have some");
        require_step(layers_, arrays.inputs);
        auto& core = nb::cast<Core&>(kept_);
        const WithoutGil unlocked;
        run_step(core.compute(), core.dense(), given_, arrays.inputs, out.data(), ids.data(), weights.data(),
                 reinterpret_cast<StepSpan*>(spans.data()));
    }

   private:
    nb::object kept_;
    PlacedLayers layers_;
    std::vector<PlacedLayer> given_;
    int64_t num_routed_ = 0, chosen_ = 0, embedded_width_ = 0;
};

}  // namespace

void bind_step(nb::module_& m) {
    nb::class_<PlacedWeights>(m, "PlacedLayer",
                              "A layer with its cache or states, for steps through all layers; slots: a device's, for experts.")
        .def(nb::init<const LayerWeights&, std::optional<Experts>, int64_t, int64_t>(), nb::arg("weights"),
             nb::arg("slots").none(), nb::arg("rope"), nb::arg("places"))
        .def("attends", &PlacedWeights::attends, nb::arg("cache_type"), nb::arg("block_tokens"), nb::arg("head_dim"),
             nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
             "Set its cache; values are not looked at where attention is latent.")
        .def("recurs", &PlacedWeights::recurs, nb::arg("conv_states").noconvert(), nb::arg("states").noconvert(),
             "Set its states.");
    nb::class_<WholeStep>(m, "WholeStep", "All layers of a model, for chunks of few tokens, as one job of the CPU.")
        .def(nb::init<nb::handle_t<Core>, const PlacedLayers&>(), nb::arg("core"), nb::arg("layers"))
        .def("run", &WholeStep::run, nb::arg("x").noconvert(), nb::arg("positions").noconvert(), nb::arg("ropes"),
             nb::arg("places"), nb::arg("runs").noconvert(), nb::arg("embedded").noconvert().none(),
             nb::arg("out").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("spans").noconvert(),
             "Compute a step, but for `embedded` [layers, tokens, width] as StepGraph.run takes it. ids, weights [layers\n"
             "with experts, tokens, chosen]; spans [layers, 2]: each layer's begin and end in ns of CLOCK_MONOTONIC.");
}

}  // namespace thermocline::python
