// A whole layer and the threads' timeline for Python: checks shapes and ranges, then runs without the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

#include "bindings_checks.h"
#include "thermocline/layer.h"

namespace thermocline::python {
namespace {

using Gain = In<float, 1>;

// The weights of a layer, checked against each other once, and kept alive.
class LayerWeights {
   public:
    LayerWeights(Gain norm, const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& output,
                 std::optional<Gain> q_gain, std::optional<Gain> k_gain, float epsilon, float attention_scale,
                 Gain router_norm, const Matrix& router, int64_t chosen, bool normalize, float min_sum, float scale,
                 const Experts& experts)
        : norm_(std::move(norm)),
          q_gain_(std::move(q_gain)),
          k_gain_(std::move(k_gain)),
          router_norm_(std::move(router_norm)),
          matrices_{q, k, v, output, router},
          experts_(experts) {
        layer_.attention = {norm_.data(), q.weight(), k.weight(), v.weight(), output.weight(),
                            q_gain_ ? q_gain_->data() : nullptr, k_gain_ ? k_gain_->data() : nullptr, epsilon,
                            attention_scale};
        layer_.router = {router_norm_.data(), router.weight(), chosen, normalize, min_sum, scale};
        layer_.gate = {experts_.gate[0]};
        layer_.up = {experts_.up[0]};
        layer_.down = {experts_.down[0]};
        check();
    }

    const Layer& layer() const { return layer_; }
    int64_t hidden() const { return layer_.attention.output.rows; }
    int64_t head_dim() const { return q_gain_ ? size(*q_gain_, 0) : 0; }

   private:
    void check() const {
        const AttentionPart& part = layer_.attention;
        require(part.q.cols == hidden() && part.k.cols == hidden() && part.v.cols == hidden(),
                "q, k and v must have a column per hidden number");
        require(part.k.rows == part.v.rows, "k and v must have one shape");
        require(part.output.cols == part.q.rows, "output must have a column per row of q");
        require(size(norm_, 0) == hidden() && size(router_norm_, 0) == hidden(), "a norm must be [hidden]");
        require(layer_.router.matrix.cols == hidden(), "the router must have a column per hidden number");
        require(layer_.router.matrix.rows == experts_.gate.size(), "the router must have a row per expert");
        require(layer_.router.chosen >= 1 && layer_.router.chosen <= layer_.router.matrix.rows,
                "at least one and at most all experts are chosen");
        require(experts_.gate.cols() == hidden() && experts_.down.rows() == hidden(),
                "experts must take and give the hidden size");
    }

    Gain norm_;
    std::optional<Gain> q_gain_, k_gain_;
    Gain router_norm_;
    Matrix matrices_[5];  // whose bytes the layer points to
    Experts experts_;
    Layer layer_{};
};

void run_layer(Core& core, const LayerWeights& weights, In<float, 2> x, In<int32_t, 1> positions,
               In<int32_t, 1> slots, In<float, 2> cosines, In<float, 2> sines, bool pairs, In<int32_t, 1> starts,
               In<int32_t, 1> block_tables, In<int32_t, 1> table_starts, int cache_type, int64_t block_tokens,
               int64_t head_dim, Write<uint8_t, 3> keys, Write<uint8_t, 3> values, Out<2> out, Write<int32_t, 2> ids,
               Out<2> expert_weights, bool prompt) {
    const Layer& layer = weights.layer();
    const CacheShape cache = cache_shape(cache_type, block_tokens, head_dim, keys, values);
    const int64_t tokens = size(x, 0), q_rows = layer.attention.q.rows;
    require(size(x, 1) == weights.hidden() && size(out, 1) == weights.hidden() && size(out, 0) == tokens,
            "x and out must be [tokens, hidden]");
    require(layer.attention.k.rows == cache.kv_heads * head_dim && q_rows % (cache.kv_heads * head_dim) == 0,
            "the heads of q, k and the cache do not match");
    require(weights.head_dim() == 0 || weights.head_dim() == head_dim, "a gain must have head_dim entries");
    require(size(positions, 0) == tokens, "positions must have one entry per token");
    require_rotary(cosines, sines, tokens, head_dim);
    require_slots(slots, tokens, cache);
    require_sequences(cache, positions, starts, block_tables, table_starts);
    require(size(ids, 0) == tokens && size(ids, 1) == layer.router.chosen && size(expert_weights, 0) == tokens &&
                size(expert_weights, 1) == layer.router.chosen,
            "ids and weights must be [tokens, chosen]");
    const LayerTokens of{tokens,          positions.data(),      slots.data(),         cosines.data(),
                         sines.data(),    2 * size(cosines, 1),  pairs ? RopeLayout::Pairs : RopeLayout::Halves,
                         starts.data(),   block_tables.data(),   table_starts.data(),  size(starts, 0) - 1};
    const nb::gil_scoped_release unlocked;
    thermocline::run_layer(core.compute(), core.dense(), prompt ? Form::Prompt : Form::Decode, layer, of,
                           {cache, keys.data(), values.data()}, x.data(), out.data(), ids.data(),
                           expert_weights.data());
}

int64_t take_timeline(Core& core, int thread, Write<int64_t, 2> out) {
    static_assert(sizeof(PoolSpan) == 3 * sizeof(int64_t));
    require(thread >= 0 && thread < core.threads(), "no such thread");
    require(size(out, 1) == 3 && size(out, 0) >= core.timeline_capacity(), "out must be [capacity, 3]");
    return core.pool().take(thread, reinterpret_cast<PoolSpan*>(out.data()));
}

}  // namespace

void bind_layer(nb::module_& m, nb::class_<Core>& core) {
    nb::class_<LayerWeights>(m, "LayerWeights", "The weights of a layer, for run_layer.")
        .def(nb::init<Gain, const Matrix&, const Matrix&, const Matrix&, const Matrix&, std::optional<Gain>,
                      std::optional<Gain>, float, float, Gain, const Matrix&, int64_t, bool, float, float,
                      const Experts&>(),
             nb::kw_only(), nb::arg("norm").noconvert(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("output"),
             nb::arg("q_gain").noconvert().none(), nb::arg("k_gain").noconvert().none(), nb::arg("epsilon"),
             nb::arg("attention_scale"), nb::arg("router_norm").noconvert(), nb::arg("router"), nb::arg("chosen"),
             nb::arg("normalize"), nb::arg("min_sum"), nb::arg("scale"), nb::arg("experts"));
    core.def("run_layer", &run_layer, nb::arg("layer"), nb::arg("x").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("slots").noconvert(), nb::arg("cosines").noconvert(), nb::arg("sines").noconvert(),
             nb::arg("pairs"), nb::arg("starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("table_starts").noconvert(), nb::arg("cache_type"), nb::arg("block_tokens"),
             nb::arg("head_dim"), nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
             nb::arg("out").noconvert(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("prompt"),
             "Attention, routing and all chosen experts; their jobs are marked 0, 1 and 2.")
        .def("busy_ns", &Core::busy_ns, "How long each thread has worked on jobs so far; never waits for one.")
        .def("start_timeline", &Core::start_timeline, nb::arg("capacity"),
             "Forget what was noted; note what each thread works on from now on, marked 0, up to `capacity` jobs\n"
             "between two calls of take_timeline.")
        .def("take_timeline", &take_timeline, nb::arg("thread"), nb::arg("out").noconvert(),
             "Rows of begin and end (ns of CLOCK_MONOTONIC) and mark to out [capacity, 3]; returns their number.");
}

}  // namespace thermocline::python
