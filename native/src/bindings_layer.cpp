// A whole layer and the threads' timeline for Python: checks shapes and ranges, then runs without the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "layer_weights.h"

namespace thermocline::python {
namespace {

void require_outputs(const LayerWeights& weights, const In<float, 2>& x, const Out<2>& out,
                     const Write<int32_t, 2>& ids, const Out<2>& expert_weights) {
    const int64_t tokens = size(x, 0), chosen = weights.layer().is_routed ? weights.layer().router.rule.chosen : 0;
    require(size(x, 1) == weights.hidden() && size(out, 1) == weights.hidden() && size(out, 0) == tokens,
            "x and out must be [tokens, hidden]");
    require(size(ids, 0) == tokens && size(ids, 1) == chosen && size(expert_weights, 0) == tokens &&
                size(expert_weights, 1) == chosen,
            "ids and weights must be [tokens, chosen]");
}

// What Python wants to be called with between a layer's routing and its experts: an array for the residual stream, and
// the function that is called when it is there.
struct RoutedCall {
    RoutedCall(Out<2> stream, nb::object call) : stream(std::move(stream)), call(std::move(call)) {}

    Out<2> stream;
    nb::object call;
};

OnRouted calling(const RoutedCall* routed, const In<float, 2>& x) {
    if (routed == nullptr) return {};
    require(size(routed->stream, 0) == size(x, 0) && size(routed->stream, 1) == size(x, 1),
            "the stream must be [tokens, hidden]");
    return [routed](const float* stream) {
        std::memcpy(routed->stream.data(), stream, routed->stream.nbytes());
        const WithGil locked;
        routed->call();
    };
}

void run_layer(Core& core, const LayerWeights& weights, In<float, 2> x, In<int32_t, 1> positions,
               In<int32_t, 1> slots, In<float, 2> cosines, In<float, 2> sines, bool pairs, In<int32_t, 1> starts,
               In<int32_t, 1> block_tables, In<int32_t, 1> table_starts, int cache_type, int64_t block_tokens,
               int64_t head_dim, Write<uint8_t, 3> keys, Write<uint8_t, 3> values, Out<2> out, Write<int32_t, 2> ids,
               Out<2> expert_weights, bool prompt, std::optional<In<float, 2>> embedded, const RoutedCall* routed) {
    const Layer& layer = weights.layer();
    const CacheShape cache = cache_shape(cache_type, block_tokens, head_dim, keys, values);
    const int64_t tokens = size(x, 0);
    require_outputs(weights, x, out, ids, expert_weights);
    weights.attention().require_heads(cache);
    require(size(positions, 0) == tokens, "positions must have one entry per token");
    require_rotary(cosines, sines, tokens, head_dim);
    require_slots(slots, tokens, cache);
    require_sequences(cache, positions, starts, block_tables, table_starts);
    const LayerTokens of{tokens,          positions.data(),      slots.data(),         cosines.data(),
                         sines.data(),    2 * size(cosines, 1),  pairs ? RopeLayout::Pairs : RopeLayout::Halves,
                         starts.data(),   block_tables.data(),   table_starts.data(),  size(starts, 0) - 1,
                         nullptr,         embedded ? embedded->data() : nullptr};
    require(embedded.has_value() == layer.embedding.exists &&
                (!embedded || (size(*embedded, 0) == tokens && size(*embedded, 1) == layer.embedding.gate.rows)),
            "embedded must be [tokens, width of the layer's embeddings], where it has some");
    const OnRouted on_routed = calling(routed, x);
    const WithoutGil unlocked;
    thermocline::run_layer(core.compute(), core.dense(), prompt ? Form::Prompt : Form::Decode, layer, of,
                           {cache, keys.data(), values.data()}, x.data(), out.data(), ids.data(),
                           expert_weights.data(), on_routed);
}

void run_latent_layer(Core& core, const LayerWeights& weights, In<float, 2> x, In<int32_t, 1> positions,
                      In<int32_t, 1> slots, In<float, 2> cosines, In<float, 2> sines, In<int32_t, 1> starts,
                      In<int32_t, 1> block_tables, In<int32_t, 1> table_starts, In<int32_t, 1> expanded, int cache_type,
                      int64_t block_tokens, Write<uint8_t, 3> keys, Out<2> out, Write<int32_t, 2> ids, Out<2> expert_weights, bool prompt,
                      const RoutedCall* routed) {
    const LatentPart& part = weights.latent().part();
    const int64_t tokens = size(x, 0), dims = 2 * size(cosines, 1);
    const CacheShape cache = latent_shape(cache_type, block_tokens, part.kv.rows, part.latent(), keys);
    require_outputs(weights, x, out, ids, expert_weights);
    require(dims + part.latent() == part.kv.rows, "kv must have a row per latent number and per one that is turned");
    require(size(positions, 0) == tokens, "positions must have one entry per token");
    require_rotary(cosines, sines, tokens, dims);
    require_slots(slots, tokens, cache);
    require_sequences(cache, positions, starts, block_tables, table_starts);
    require_expanded(expanded, starts);
    const LayerTokens of{tokens,         positions.data(),    slots.data(),        cosines.data(),     sines.data(), dims,
                         RopeLayout::Pairs, starts.data(),    block_tables.data(), table_starts.data(),
                         size(starts, 0) - 1, expanded.data()};
    const OnRouted on_routed = calling(routed, x);
    const WithoutGil unlocked;
    thermocline::run_layer(core.compute(), core.dense(), prompt ? Form::Prompt : Form::Decode, weights.layer(), of,
                           {cache, keys.data(), keys.data()}, x.data(), out.data(), ids.data(), expert_weights.data(), on_routed);
}

void run_recurrent_layer(Core& core, const LayerWeights& weights, In<float, 2> x, In<int32_t, 2> runs,
                     ConvStates conv_states, States states, Out<2> out, Write<int32_t, 2> ids, Out<2> expert_weights,
                     bool prompt, const RoutedCall* routed) {
    require_outputs(weights, x, out, ids, expert_weights);
    require_states(weights.state(), conv_states, states);
    require(size(runs, 1) == 4, "runs must be [runs, 4]");
    const int64_t slots = size(conv_states, 0);
    std::vector<StateRun> found;
    std::vector<int64_t> copies;
    int64_t end = 0;
    for (int64_t r = 0; r < size(runs, 0); ++r) {
        const int32_t* row = runs.data() + 4 * r;
        require(row[0] == end && row[1] > 0, "runs must follow each other");
        require(row[2] >= 0 && row[2] < slots && row[3] >= -1 && row[3] < slots, "a slot lies beyond the states");
        end += row[1];
        found.push_back({row[0], row[1], row[2]});
        copies.push_back(row[3]);
    }
    require(end == size(x, 0), "the runs must cover all tokens");
    const OnRouted on_routed = calling(routed, x);
    const WithoutGil unlocked;
    thermocline::run_layer(core.compute(), core.dense(), prompt ? Form::Prompt : Form::Decode, weights.layer(),
                           {size(x, 0), found.data(), copies.data(), static_cast<int64_t>(found.size()),
                            conv_states.data(), states.data()},
                           x.data(), out.data(), ids.data(), expert_weights.data(), on_routed);
}

void run_plain_layer(Core& core, const LayerWeights& weights, In<float, 2> x, Out<2> out, Write<int32_t, 2> ids,
                     Out<2> expert_weights, bool prompt, const RoutedCall* routed) {
    require_outputs(weights, x, out, ids, expert_weights);
    weights.require_no_mixer();
    const OnRouted on_routed = calling(routed, x);
    const WithoutGil unlocked;
    thermocline::run_layer(core.compute(), core.dense(), prompt ? Form::Prompt : Form::Decode, weights.layer(),
                           size(x, 0), x.data(), out.data(), ids.data(), expert_weights.data(), on_routed);
}

int64_t take_timeline(Core& core, int thread, Write<int64_t, 2> out) {
    static_assert(sizeof(PoolSpan) == 3 * sizeof(int64_t));
    require(thread >= 0 && thread < core.threads(), "no such thread");
    require(size(out, 1) == 3 && size(out, 0) >= core.timeline_capacity(), "out must be [capacity, 3]");
    return core.pool().take(thread, reinterpret_cast<PoolSpan*>(out.data()));
}

}  // namespace

void bind_layer(nb::module_& m, nb::class_<Core>& core) {
    const auto optional = [](const char* name) { return nb::arg(name).noconvert().none(); };
    nb::class_<PostNormWeights>(m, "PostNorm", "A norm before the addition to the residual stream, for LayerWeights.")
        .def(nb::init<Gain, Gains, Gains, float, float>(), nb::kw_only(), nb::arg("gain").noconvert(),
             optional("first_gain"), optional("second_gain"), nb::arg("epsilon"), nb::arg("scale"));
    nb::class_<AttentionWeights>(m, "AttentionWeights", "Attention, for LayerWeights.")
        .def(nb::init<Gain, const Matrix&, std::optional<Matrix>, std::optional<Matrix>, const Matrix&, Gains, Gains, Gains, Gains,
                      Gains, Gains, Gains, float, bool, float, int64_t, int, bool, std::optional<Matrix>, Gains, Gains, Gains,
                      std::optional<PostNormWeights>, bool, std::optional<Temperature>, bool, Gains, float>(),
             nb::kw_only(), nb::arg("norm").noconvert(), nb::arg("q"), nb::arg("k").none(), nb::arg("v").none(), nb::arg("output"),
             optional("q_gain"), optional("k_gain"), optional("wide_q_gain"), optional("wide_k_gain"),
             optional("q_bias"), optional("k_bias"), optional("v_bias"), nb::arg("epsilon"), nb::arg("norm_last"),
             nb::arg("scale"),
             nb::arg("window"), nb::arg("activation"), nb::arg("gate_in_q"), nb::arg("gate").none(), optional("sinks"),
             optional("output_bias"), optional("v_gain"), nb::arg("post").none(), nb::arg("chunked"),
             nb::arg("temperature").none(), nb::arg("centers"), optional("norm_bias"), nb::arg("clip"));
    nb::class_<DeltaWeights>(m, "DeltaWeights", "The gated delta rule, for LayerWeights.")
        .def(nb::init<Gain, std::vector<Matrix>, const Matrix&, const Matrix&, const Matrix&, const Matrix&,
                      std::optional<Matrix>, std::optional<Matrix>, const DeltaRule&>(),
             nb::kw_only(), nb::arg("norm").noconvert(), nb::arg("mixed"), nb::arg("z"), nb::arg("alpha"),
             nb::arg("beta"), nb::arg("output"), nb::arg("z_low").none(), nb::arg("alpha_low").none(), nb::arg("rule"));
    nb::class_<SelectiveWeights>(m, "SelectiveWeights",
                                 "The first Mamba's products between its convolution and its scan, for RecurrentWeights.")
        .def(nb::init<const Matrix&, const Matrix&, const Matrix&, const Matrix&, Gain, Gain, Gain>(), nb::arg("low"), nb::arg("keys"), nb::arg("queries"), nb::arg("steps"), nb::arg("low_gain").noconvert(),
             nb::arg("key_gain").noconvert(), nb::arg("query_gain").noconvert());
    nb::class_<RecurrentWeights>(m, "RecurrentWeights", "A short convolution, Mamba2 or the first Mamba, for LayerWeights.")
        .def(nb::init<Gain, float, const Matrix&, const Matrix&, std::variant<ShortConvRule, MambaRule, SelectiveRule>,
                      std::optional<SelectiveWeights>>(),
             nb::kw_only(), nb::arg("norm").noconvert(), nb::arg("epsilon"), nb::arg("input"), nb::arg("output"),
             nb::arg("rule"), nb::arg("products").none());
    bind_latent(m, core);
    nb::class_<RoutedExperts>(m, "RoutedExperts", "A router and its experts, for LayerWeights.")
        .def(nb::init<const Matrix&, int64_t, bool, float, float, int, Gains, Gains, int64_t, int64_t, int64_t, const Experts&, Gains, Gains,
                      bool, std::optional<Matrix>, std::optional<Matrix>>(),
             nb::kw_only(),
             nb::arg("router"), nb::arg("chosen"), nb::arg("normalize"), nb::arg("min_sum"), nb::arg("scale"),
             nb::arg("gating"), optional("logit_bias"), optional("bias"), nb::arg("groups"), nb::arg("groups_used"),
             nb::arg("group_best"), nb::arg("experts"), optional("norm"), optional("experts_norm"),
             nb::arg("weighs_input"), nb::arg("down").none(),
             nb::arg("up").none());
    nb::class_<SharedExpert>(m, "SharedExpert", "The expert that every token takes, for LayerWeights.")
        .def(nb::init<const Experts&, std::optional<Matrix>>(), nb::arg("experts"), nb::arg("gate").none());
    nb::class_<EmbeddingWeights>(m, "EmbeddingWeights", "What a layer adds of its embeddings of tokens, for LayerWeights.")
        .def(nb::init<const Matrix&, const Matrix&, const PostNormWeights&>(), nb::kw_only(), nb::arg("gate"),
             nb::arg("up"), nb::arg("norm"));
    nb::class_<LayerWeights>(m, "LayerWeights", "The weights of a layer, for run_layer.")
        .def(nb::init<std::optional<AttentionWeights>, std::optional<DeltaWeights>, std::optional<RecurrentWeights>,
                      std::optional<LatentWeights>, Gains, float, std::optional<RoutedExperts>,
                      std::optional<SharedExpert>, std::optional<PostNormWeights>, std::optional<EmbeddingWeights>, int,
                      bool, Gains>(),
             nb::kw_only(), nb::arg("attention").none(), nb::arg("delta").none(), nb::arg("recurrent").none(),
             nb::arg("latent").none(), optional("norm"), nb::arg("epsilon"),
             nb::arg("routed").none(), nb::arg("shared").none(), nb::arg("end").none(),
             nb::arg("embedding").none(), nb::arg("handed_on"), nb::arg("centers"), optional("norm_bias"));
    nb::class_<RoutedCall>(m, "RoutedCall",
                           "What run_layer calls, without arguments, between routing and the experts, when ids and weights are\n"
                           "there, and the residual stream in `stream` [tokens, hidden].")
        .def(nb::init<Out<2>, nb::object>(), nb::arg("stream").noconvert(), nb::arg("call"));
    core.def("run_layer", &run_layer, nb::arg("layer"), nb::arg("x").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("slots").noconvert(), nb::arg("cosines").noconvert(), nb::arg("sines").noconvert(),
             nb::arg("pairs"), nb::arg("starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("table_starts").noconvert(), nb::arg("cache_type"), nb::arg("block_tokens"),
             nb::arg("head_dim"), nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
             nb::arg("out").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("prompt"), optional("embedded"), nb::arg("routed").none() = nb::none(),
             "Attention, routing and all chosen experts; their jobs are marked 0, 1 and 2. routed: called between the\n"
             "last two, on this thread; experts that are not in memory are then computed last.")
        .def("run_latent_layer", &run_latent_layer, nb::arg("layer"), nb::arg("x").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("slots").noconvert(), nb::arg("cosines").noconvert(),
             nb::arg("sines").noconvert(), nb::arg("starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("table_starts").noconvert(), nb::arg("expanded").noconvert(), nb::arg("cache_type"),
             nb::arg("block_tokens"), nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
             nb::arg("ids").noconvert(), nb::arg("weights").noconvert(), nb::arg("prompt"),
             nb::arg("routed").none() = nb::none(),
             "The same for a layer with latent attention.")
        .def("run_recurrent_layer", &run_recurrent_layer, nb::arg("layer"), nb::arg("x").noconvert(),
             nb::arg("runs").noconvert(), nb::arg("conv_states").noconvert(), nb::arg("states").noconvert(),
             nb::arg("out").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("prompt"), nb::arg("routed").none() = nb::none(),
             "The same for a layer with recurrent state.")
        .def("run_plain_layer", &run_plain_layer, nb::arg("layer"), nb::arg("x").noconvert(),
             nb::arg("out").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("prompt"), nb::arg("routed").none() = nb::none(),
             "The same for a layer without a mixer.")
        .def("busy_ns", &Core::busy_ns, "How long each thread has worked on jobs so far; never waits for one.")
        .def("start_timeline", &Core::start_timeline, nb::arg("capacity"),
             "Forget what was noted; note what each thread works on from now on, marked 0, up to `capacity` jobs\n"
             "between two calls of take_timeline.")
        .def("take_timeline", &take_timeline, nb::arg("thread"), nb::arg("out").noconvert(),
             "Rows of begin and end (ns of CLOCK_MONOTONIC) and mark to out [capacity, 3]; returns their number.");
}

}  // namespace thermocline::python
