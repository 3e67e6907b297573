// What Python sees of the dense kernels: checks shapes and ranges, then runs a job without the GIL.
#include "bindings_checks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "thermocline/dense.h"

namespace tc = thermocline;

namespace thermocline::python {
namespace {

void rms_norm(Core& core, In<float, 2> x, In<float, 1> gain, float epsilon, Write<float, 2> out) {
    require(size(gain, 0) == size(x, 1), "gain must have one entry per column");
    require(size(out, 0) == size(x, 0) && size(out, 1) == size(x, 1), "x and out must have one shape");
    const WithoutGil unlocked;
    tc::rms_norm(core.dense(), x.data(), gain.data(), epsilon, size(x, 0), size(x, 1), out.data());
}

void layer_norm(Core& core, In<float, 2> x, In<float, 1> gain, std::optional<In<float, 1>> bias, float epsilon,
                Write<float, 2> out) {
    require(size(gain, 0) == size(x, 1), "gain must have one entry per column");
    require(!bias || size(*bias, 0) == size(x, 1), "a bias must have one entry per column");
    require(size(out, 0) == size(x, 0) && size(out, 1) == size(x, 1), "x and out must have one shape");
    const WithoutGil unlocked;
    tc::layer_norm(core.dense(), x.data(), gain.data(), bias ? bias->data() : nullptr, epsilon, size(x, 0), size(x, 1),
                   out.data());
}

void rope_table(Core& core, In<int32_t, 1> positions, In<double, 1> frequencies, double magnitude,
                Write<float, 2> cosines, Write<float, 2> sines) {
    for (const auto& out : {cosines, sines})
        require(size(out, 0) == size(positions, 0) && size(out, 1) == size(frequencies, 0),
                "cosines and sines must be [positions, frequencies]");
    const WithoutGil unlocked;
    tc::rope_table(core.dense(), positions.data(), size(positions, 0), frequencies.data(),
                   size(frequencies, 0), magnitude, cosines.data(), sines.data());
}

void prepare_heads(Core& core, Write<float, 3> q, std::optional<In<float, 3>> k, std::optional<In<float, 3>> v,
                   std::optional<In<float, 1>> q_gain, std::optional<In<float, 1>> k_gain,
                   float epsilon, bool norm_last, In<float, 2> cosines, In<float, 2> sines, bool pairs, int cache_type,
                   int64_t block_tokens, Write<uint8_t, 3> keys, Write<uint8_t, 3> values,
                   In<int32_t, 1> slots, std::optional<In<float, 1>> v_gain) {
    const tc::CacheShape cache = cache_shape(cache_type, block_tokens, size(q, 2), keys, values);
    const int64_t tokens = size(q, 0);
    require(k.has_value() == v.has_value(), "keys and values come together");
    for (const auto& x : {k, v})
        require(!x || (size(*x, 0) == tokens && size(*x, 1) == cache.kv_heads), "k and v must be [tokens, kv_heads, numbers]");
    require(!k || (size(*k, 2) == cache.head_dim && size(*v, 2) == cache.value_dim()),
            "k must have head_dim numbers per head, and v those of the cache's values");
    for (const auto& gain : {q_gain, k_gain})
        require(!gain || size(*gain, 0) == cache.head_dim, "a gain must have head_dim entries");
    require(!v_gain || size(*v_gain, 0) == cache.value_dim(), "a gain of values must have an entry per number");
    require_rotary(cosines, sines, tokens, cache.head_dim);
    require_slots(slots, tokens, cache);
    const tc::HeadsJob job{q.data(),
                           k ? k->data() : nullptr,
                           v ? v->data() : nullptr,
                           tokens,
                           size(q, 1),
                           q_gain ? q_gain->data() : nullptr,
                           k_gain ? k_gain->data() : nullptr,
                           epsilon,
                           cosines.data(),
                           sines.data(),
                           2 * size(cosines, 1),
                           pairs ? tc::RopeLayout::Pairs : tc::RopeLayout::Halves,
                           cache,
                           keys.data(),
                           values.data(),
                           slots.data(),
                           norm_last,

                           v_gain ? v_gain->data() : nullptr};
    const WithoutGil unlocked;
    tc::prepare_heads(core.dense(), job);
}

void make_temperature(tc::Temperature* self, float scale, int64_t length, int64_t offset) {
    require(length > 0 && offset >= 0, "a temperature has a length, and no offset below zero");
    new (self) tc::Temperature{scale, length, offset};
}

// For starts, block_tables and table_starts see require_sequences.
void attention(Core& core, In<float, 3> q, In<int32_t, 1> positions, In<int32_t, 1> starts,
               In<int32_t, 1> block_tables, In<int32_t, 1> table_starts, int cache_type,
               int64_t block_tokens, In<uint8_t, 3> keys, In<uint8_t, 3> values, float scale,
               float softcap, int64_t window, const std::optional<In<float, 1>>& sinks, bool chunked,
               std::optional<tc::Temperature> temperature, const std::optional<In<uint16_t, 3>>& chosen, bool prompt,
               Write<float, 3> out) {
    const tc::CacheShape cache = cache_shape(cache_type, block_tokens, size(q, 2), keys, values);
    const int64_t heads = size(q, 1), row = heads * cache.head_dim, out_row = heads * cache.value_dim();
    const int64_t sequences = size(starts, 0) - 1;
    require(heads > 0 && heads % cache.kv_heads == 0, "heads must be a multiple of kv_heads");
    require(size(out, 0) == size(q, 0) && size(out, 1) == heads && size(out, 2) == cache.value_dim(),
            "out must be [tokens, heads, numbers of a value]");
    require(size(positions, 0) == size(q, 0), "positions must have one entry per token");
    require(window >= 0 && softcap >= 0.0f, "window and softcap must not be negative");
    require(!chunked || window > 0, "chunks have a size");
    require(!sinks || size(*sinks, 0) == heads, "sinks must have a number per head");
    require_sequences(cache, positions, starts, block_tables, table_starts);
    require(!chosen || size(*chosen, 0) == size(q, 0), "chosen must have a row per token");
    const int64_t lists = chosen ? size(*chosen, 1) : 1, words = chosen ? size(*chosen, 2) : 0;
    require(lists == 1 || lists == cache.kv_heads, "chosen must have one list, or one for each key head");
    if (chosen)
        require_below(positions.data(), size(positions, 0), words * tc::kWordPositions,
                      "chosen must have a bit for every position up to a token's own");
    std::vector<tc::AttentionJob> jobs;
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t first = starts.data()[s], tokens = starts.data()[s + 1] - first;
        const int64_t table = table_starts.data()[s];
        if (tokens == 0) continue;
        jobs.push_back({q.data() + first * row, positions.data() + first, tokens, heads, cache,
                        keys.data(), values.data(), block_tables.data() + table, scale, softcap,
                        window, out.data() + first * out_row, sinks ? sinks->data() : nullptr, chunked,
                        temperature.value_or(tc::Temperature{0.0f, 1, 0})});
        if (!chosen) continue;
        jobs.back().chosen = chosen->data() + first * lists * words;
        jobs.back().chosen_words = words;
        jobs.back().chosen_lists = lists;
    }
    const WithoutGil unlocked;
    tc::attention(core.compute(), form_of(prompt), jobs.data(), static_cast<int64_t>(jobs.size()));
}

void route(Core& core, In<float, 2> logits, int gating, std::optional<In<float, 1>> logit_bias,
           std::optional<In<float, 1>> bias, int64_t groups, int64_t groups_used, int64_t group_best, bool normalize, float min_sum,
           float scale, const std::optional<In<int32_t, 2>>& given, Write<int32_t, 2> ids, Write<float, 2> weights) {
    const int64_t tokens = size(logits, 0), experts = size(logits, 1), chosen = size(ids, 1);
    require(size(ids, 0) == tokens && size(weights, 0) == tokens && size(weights, 1) == chosen,
            "ids and weights must be [tokens, chosen]");
    for (const auto& each : {logit_bias, bias})
        require(!each || size(*each, 0) == experts, "a bias must have an entry per expert");
    const RouteRule rule{chosen, static_cast<tc::Gating>(gating), logit_bias ? logit_bias->data() : nullptr,
                         bias ? bias->data() : nullptr, groups, groups_used, group_best, normalize, min_sum, scale};
    require_rule(rule, experts);
    require(!given || (size(*given, 0) == tokens && size(*given, 1) == chosen), "given must be [tokens, chosen]");
    if (given) require_below(given->data(), tokens * chosen, experts, "an expert that is given does not exist");
    const WithoutGil unlocked;
    tc::route(core.dense(), {logits.data(), tokens, experts, rule, ids.data(), weights.data(), nullptr,
                             given ? given->data() : nullptr});
}

void gate(Core& core, In<float, 2> x, In<float, 2> gates, int activation, Write<float, 2> out) {
    const int64_t rows = size(x, 0), width = size(x, 1), gate_width = size(gates, 1);
    require(size(out, 0) == rows && size(out, 1) == width, "x and out must have one shape");
    require(size(gates, 0) == rows && (gate_width == 1 || gate_width == width),
            "gate must have a row per row of x, of one number or as many as x");
    require(activation >= 0 && activation <= 2, "no such activation");
    const WithoutGil unlocked;
    tc::gate(core.dense(), {x.data(), gates.data(), rows, width, gate_width, gate_width,
                            static_cast<tc::Activation>(activation), out.data()});
}

void add_normed(Core& core, In<float, 2> x, In<float, 2> first, std::optional<In<float, 2>> second,
                In<float, 1> gain, std::optional<In<float, 1>> first_gain, std::optional<In<float, 1>> second_gain,
                float epsilon, float scale, Write<float, 2> out) {
    const int64_t rows = size(x, 0), width = size(x, 1);
    require(size(first, 0) == rows && size(first, 1) == width && size(out, 0) == rows && size(out, 1) == width,
            "x, what is added and out must have one shape");
    require(!second || (size(*second, 0) == rows && size(*second, 1) == width), "both parts must have x's shape");
    require(first_gain.has_value() == second_gain.has_value() && (second || !first_gain),
            "two parts have a gain each or none, and one part has none");
    require(size(gain, 0) == width &&
                (!first_gain || (size(*first_gain, 0) == width && size(*second_gain, 0) == width)),
            "a gain must have one entry per column");
    const WithoutGil unlocked;
    tc::add_normed(core.dense(), {x.data(), first.data(), second ? second->data() : nullptr, rows, width,
                                  {gain.data(), first_gain ? first_gain->data() : nullptr,
                                   second_gain ? second_gain->data() : nullptr, epsilon, scale},
                                  out.data()});
}

void softcap(Core& core, In<float, 2> x, float cap, Write<float, 2> out) {
    require(size(out, 0) == size(x, 0) && size(out, 1) == size(x, 1), "x and out must have one shape");
    require(cap > 0.0f, "the cap must be positive");
    const WithoutGil unlocked;
    tc::softcap(core.dense(), x.data(), cap, size(x, 0), size(x, 1), out.data());
}

void take_streams(Core& core, In<float, 2> x, In<float, 2> logits, In<float, 1> base, In<float, 1> scales, float floor,
                  int64_t rounds, Write<float, 2> taken, Write<float, 2> rest, Write<float, 2> shares) {
    const int64_t tokens = size(x, 0), streams = size(shares, 1), width = size(taken, 1), count = (2 + streams) * streams;
    require(streams >= 2 && streams <= tc::kMaxStreams, "there must be 2 to 16 streams");
    require(size(x, 1) == streams * width, "x must be [tokens, streams * width]");
    require(size(logits, 0) == tokens && size(logits, 1) == count, "logits must be [tokens, (2 + streams) * streams]");
    require(size(base, 0) == count && size(scales, 0) == 3, "base must have one entry per logit, and scales three");
    require(rounds >= 1, "at least one round is needed");
    require(size(taken, 0) == tokens && size(shares, 0) == tokens, "taken and shares must have a row per token");
    require(size(rest, 0) == tokens && size(rest, 1) == size(x, 1), "x and rest must have one shape");
    const WithoutGil unlocked;
    tc::take_streams(core.dense(), {x.data(), logits.data(), tokens, streams, width,
                                    {base.data(), scales.data(), floor, rounds}, taken.data(), rest.data(), shares.data()});
}

void pool_rows(Core& core, In<float, 3> rows, In<float, 3> gates, In<float, 2> places, Write<float, 2> out) {
    const int64_t entries = size(rows, 0), count = size(rows, 1), width = size(rows, 2);
    require(count >= 1, "there must be a row to pool");
    require(size(gates, 0) == entries && size(gates, 1) == count && size(gates, 2) == width,
            "rows and gates must have one shape");
    require(size(places, 0) == count && size(places, 1) == width, "places must be [count, width]");
    require(size(out, 0) == entries && size(out, 1) == width, "out must be [entries, width]");
    const WithoutGil unlocked;
    tc::pool_rows(core.dense(), {rows.data(), gates.data(), places.data(), entries, count, width, out.data()});
}

using Part = std::tuple<In<int32_t, 1>, In<int32_t, 1>, In<float, 2>>;

void combine(Core& core, In<float, 2> residual, const std::vector<Part>& parts, int64_t slots, Write<float, 2> out) {
    const int64_t tokens = size(residual, 0), width = size(residual, 1);
    require(size(out, 0) == tokens && size(out, 1) == width, "residual and out must have one shape");
    require(slots >= 1, "at least one slot is needed");
    std::vector<tc::Contributions> contributions;
    for (const auto& [rows, places, values] : parts) {
        const int64_t count = size(rows, 0);
        require(size(places, 0) == count && size(values, 0) == count && size(values, 1) == width,
                "rows, slots and values of a part must have one entry each");
        require_below(rows.data(), count, tokens, "row id out of range");
        require_below(places.data(), count, slots, "slot out of range");
        contributions.push_back({rows.data(), places.data(), values.data(), count});
    }
    bool complete = false;
    {
        const WithoutGil unlocked;
        complete = tc::combine(core.dense(), residual.data(), contributions.data(),
                               static_cast<int64_t>(contributions.size()), tokens, slots, width,
                               out.data());
    }
    require(complete, "every slot of every token needs exactly one contribution");
}

}  // namespace

void bind_dense(nb::module_& m, nb::class_<Core>& core) {
    nb::class_<tc::Temperature>(m, "Temperature", "A factor on a token's scores that grows with its position.")
        .def("__init__", &make_temperature, nb::kw_only(), nb::arg("scale"), nb::arg("length"), nb::arg("offset"));
    core
        .def("rms_norm", &rms_norm, nb::arg("x").noconvert(), nb::arg("gain").noconvert(),
             nb::arg("epsilon"), nb::arg("out").noconvert(),
             "out = x / sqrt(mean(x^2) + epsilon) * gain, row by row.")
        .def("layer_norm", &layer_norm, nb::arg("x").noconvert(), nb::arg("gain").noconvert(),
             nb::arg("bias").noconvert().none(), nb::arg("epsilon"), nb::arg("out").noconvert(),
             "The same of x - mean(x), row by row, plus the bias.")
        .def("rope_table", &rope_table, nb::arg("positions").noconvert(),
             nb::arg("frequencies").noconvert(), nb::arg("magnitude"), nb::arg("cosines").noconvert(),
             nb::arg("sines").noconvert(), "Cosines and sines of position * frequency, times magnitude.")
        .def("prepare_heads", &prepare_heads, nb::arg("q").noconvert(), nb::arg("k").noconvert().none(),
             nb::arg("v").noconvert().none(), nb::arg("q_gain").noconvert().none(),
             nb::arg("k_gain").noconvert().none(), nb::arg("epsilon"), nb::arg("norm_last"), nb::arg("cosines").noconvert(),
             nb::arg("sines").noconvert(), nb::arg("pairs"), nb::arg("cache_type"),
             nb::arg("block_tokens"), nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
             nb::arg("slots").noconvert(), nb::arg("v_gain").noconvert().none(),
             "Norm and rotary embedding of q (in place) and k, norm of v, then k and v into their slots.")
        .def("attention", &attention, nb::arg("q").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("table_starts").noconvert(), nb::arg("cache_type"), nb::arg("block_tokens"),
             nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("scale"),
             nb::arg("softcap"), nb::arg("window"), nb::arg("sinks").noconvert().none(), nb::arg("chunked"),
             nb::arg("temperature").none(), nb::arg("chosen").noconvert().none(), nb::arg("prompt"),
             nb::arg("out").noconvert(), "Causal attention of some sequences' tokens over their cached keys and values.")
        .def("route", &route, nb::arg("logits").noconvert(), nb::arg("gating"),
             nb::arg("logit_bias").noconvert().none(), nb::arg("bias").noconvert().none(), nb::arg("groups"),
             nb::arg("groups_used"), nb::arg("group_best"), nb::arg("normalize"), nb::arg("min_sum"), nb::arg("scale"),
             nb::arg("given").noconvert().none(), nb::arg("ids").noconvert(), nb::arg("weights").noconvert(),
             "The best experts of each token, or those given, and their weights.")
        .def("gate", &gate, nb::arg("x").noconvert(), nb::arg("gate").noconvert(), nb::arg("activation"),
             nb::arg("out").noconvert(), "out = x times the sigmoid (0), softplus (1) or gelu (2) of gate.")
        .def("add_normed", &add_normed, nb::arg("x").noconvert(), nb::arg("first").noconvert(),
             nb::arg("second").noconvert().none(), nb::arg("gain").noconvert(),
             nb::arg("first_gain").noconvert().none(), nb::arg("second_gain").noconvert().none(),
             nb::arg("epsilon"), nb::arg("scale"), nb::arg("out").noconvert(),
             "out = (x + norm(y)) * scale, where y is first, or norm(first) + norm(second).")
        .def("softcap", &softcap, nb::arg("x").noconvert(), nb::arg("cap"), nb::arg("out").noconvert(),
             "out = cap * tanh(x / cap).")
        .def("take_streams", &take_streams, nb::arg("x").noconvert(), nb::arg("logits").noconvert(),
             nb::arg("base").noconvert(), nb::arg("scales").noconvert(), nb::arg("floor"), nb::arg("rounds"),
             nb::arg("taken").noconvert(), nb::arg("rest").noconvert(), nb::arg("shares").noconvert(),
             "What a part of a layer takes of several streams, the mixture that is left, and each stream's share.")
        .def("pool_rows", &pool_rows, nb::arg("rows").noconvert(), nb::arg("gates").noconvert(),
             nb::arg("places").noconvert(), nb::arg("out").noconvert(),
             "out = the sum over rows of the softmax of gates + places times rows, number by number.")
        .def("combine", &combine, nb::arg("residual").noconvert(), nb::arg("parts").noconvert(),
             nb::arg("slots"), nb::arg("out").noconvert(),
             "out = residual + ((slot 0 + slot 1) + ...), from (rows, slots, values) parts.");
}

}  // namespace thermocline::python
