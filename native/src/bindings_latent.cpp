// The parts of latent attention for Python: checks shapes and ranges, then runs a job without the GIL.
#include "bindings_latent.h"

#include <nanobind/stl/optional.h>

#include <limits>
#include <vector>

namespace thermocline::python {
namespace {

void multiply_heads(Core& core, const MatrixStack& weights, In<float, 3> x, Write<float, 3> out) {
    const int64_t heads = weights.size();
    require(size(x, 1) == heads && size(x, 2) == weights.cols(), "x must be [tokens, heads, columns]");
    require(size(out, 0) == size(x, 0) && size(out, 1) == heads && size(out, 2) == weights.rows(),
            "out must be [tokens, heads, rows]");
    const WithoutGil unlocked;
    thermocline::multiply_heads(core.compute(), {weights[0], weights.stride(), weights.scales()}, heads, x.data(),
                                size(x, 0), out.data(), weights.rows());
}

void prepare_latent(Core& core, Write<float, 3> q, In<float, 2> kv, Gain gain, float epsilon, In<float, 2> cosines,
                    In<float, 2> sines, int cache_type, int64_t block_tokens, Write<uint8_t, 3> keys,
                    In<int32_t, 1> slots) {
    const int64_t tokens = size(q, 0), heads = size(q, 1), dims = 2 * size(cosines, 1), dim = size(kv, 1);
    const CacheShape cache = latent_shape(cache_type, block_tokens, dim, size(gain, 0), keys);
    require(dim == cache.latent + dims && size(q, 2) >= dims, "kv must be [tokens, latent + rotary_dims]");
    require(size(kv, 0) == tokens, "kv must be [tokens, latent + rotary_dims]");
    require_rotary(cosines, sines, tokens, dim);
    require_slots(slots, tokens, cache);
    const LatentJob job{q.data(),       kv.data(),    tokens, heads, size(q, 2),  gain.data(), epsilon,
                        cosines.data(), sines.data(), dims,   cache, keys.data(), slots.data()};
    const WithoutGil unlocked;
    thermocline::prepare_latent(core.dense(), job);
}

void index_scores(Core& core, In<float, 3> q, In<float, 2> weights, In<int32_t, 1> block_table, int cache_type,
                  int64_t block_tokens, In<uint8_t, 3> rows, int64_t step, bool clips, Write<float, 2> out) {
    const int64_t tokens = size(q, 0), heads = size(q, 1), dim = size(q, 2), count = size(out, 1);
    const CacheShape cache = thermocline::python::cache_shape(cache_type, block_tokens, dim, rows, rows);
    require(cache.kv_heads == 1, "an indexer has one row per token");
    require(size(weights, 0) == tokens && size(weights, 1) == heads, "weights must be [tokens, heads]");
    require(size(out, 0) == tokens, "out must be [tokens, positions]");
    require_below(block_table.data(), size(block_table, 0), cache.num_blocks, "a block lies beyond the cache");
    require(step > 0, "a step has positions");
    require(count <= size(block_table, 0) * block_tokens / step, "a position lies beyond the block table");
    const IndexJob job{q.data(),     weights.data(), tokens,      heads,              dim,   cache.type,
                       block_tokens, rows.data(),    block_table.data(), count, out.data(), step, clips ? 0.0f : -std::numeric_limits<float>::infinity()};
    const WithoutGil unlocked;
    thermocline::index_scores(core.dense(), job);
}

// For starts, block_tables and table_starts see require_sequences.
void latent_attention(Core& core, In<float, 3> q, In<int32_t, 1> positions, In<int32_t, 1> starts,
                      In<int32_t, 1> block_tables, In<int32_t, 1> table_starts, int cache_type, int64_t block_tokens,
                      In<uint8_t, 3> keys, float scale, float softcap, int64_t window, const Gains& sinks, bool chunked,
                      std::optional<Temperature> temperature, bool prompt, Write<float, 3> out) {
    const int64_t heads = size(q, 1), dim = size(q, 2), latent = size(out, 2);
    const CacheShape cache = latent_shape(cache_type, block_tokens, dim, latent, keys);
    require(heads > 0 && size(out, 0) == size(q, 0) && size(out, 1) == heads, "out must be [tokens, heads, latent]");
    require(size(positions, 0) == size(q, 0), "positions must have one entry per token");
    require(window >= 0 && softcap >= 0.0f, "window and softcap must not be negative");
    require(!chunked || window > 0, "chunks have a size");
    require_length(sinks, heads, "sinks must have a number per head");
    require_sequences(cache, positions, starts, block_tables, table_starts);
    std::vector<AttentionJob> jobs;
    for (int64_t s = 0; s + 1 < size(starts, 0); ++s) {
        const int64_t first = starts.data()[s], tokens = starts.data()[s + 1] - first;
        if (tokens == 0) continue;
        jobs.push_back({q.data() + first * heads * dim, positions.data() + first, tokens, heads, cache, keys.data(),
                        keys.data(), block_tables.data() + table_starts.data()[s], scale, softcap, window,
                        out.data() + first * heads * latent, data(sinks), chunked,
                        temperature.value_or(Temperature{0.0f, 1, 0})});
    }
    const WithoutGil unlocked;
    thermocline::attention(core.compute(), form_of(prompt), jobs.data(), static_cast<int64_t>(jobs.size()));
}

// The same in the expanded form, with queries of the heads' own width.
void expanded_attention(Core& core, const MatrixStack& k_up, const MatrixStack& v_up, In<float, 3> q,
                        In<int32_t, 1> positions, In<int32_t, 1> starts, In<int32_t, 1> block_tables,
                        In<int32_t, 1> table_starts, int cache_type, int64_t block_tokens, In<uint8_t, 3> keys,
                        float scale, std::optional<Temperature> temperature, bool prompt, Write<float, 3> out) {
    const int64_t heads = size(q, 1), width = size(q, 2), value_dim = v_up.rows(), latent = v_up.cols();
    const CacheShape cache = latent_shape(cache_type, block_tokens, latent + width - k_up.cols(), latent, keys);
    require(k_up.rows() == latent, "the matrices of keys and values must have one latent size");
    require(heads > 0 && k_up.size() == heads && v_up.size() == heads, "numbers of heads differ");
    require(size(out, 0) == size(q, 0) && size(out, 1) == heads && size(out, 2) == value_dim,
            "out must be [tokens, heads, value_dim]");
    require(size(positions, 0) == size(q, 0), "positions must have one entry per token");
    require_sequences(cache, positions, starts, block_tables, table_starts);
    const Expansion expansion{{k_up[0], k_up.stride(), k_up.scales()},
                              {v_up[0], v_up.stride(), v_up.scales()},
                              core.compute().set.gemm->decode_row};
    std::vector<AttentionJob> jobs;
    for (int64_t s = 0; s + 1 < size(starts, 0); ++s) {
        const int64_t first = starts.data()[s], tokens = starts.data()[s + 1] - first;
        if (tokens == 0) continue;
        jobs.push_back({q.data() + first * heads * width, positions.data() + first, tokens, heads, cache, keys.data(),
                        keys.data(), block_tables.data() + table_starts.data()[s], scale, 0.0f, 0,
                        out.data() + first * heads * value_dim, nullptr, false,
                        temperature.value_or(Temperature{0.0f, 1, 0})});
        jobs.back().expansion = &expansion;
    }
    const WithoutGil unlocked;
    thermocline::attention(core.compute(), form_of(prompt), jobs.data(), static_cast<int64_t>(jobs.size()));
}

}  // namespace

void bind_latent(nb::module_& m, nb::class_<Core>& core) {
    nb::class_<LatentWeights>(m, "LatentWeights", "Latent attention, for LayerWeights.")
        .def(nb::init<Gain, std::optional<Matrix>, Gains, const Matrix&, const Matrix&, Gain, const MatrixStack&,
                      const MatrixStack&, const Matrix&, float, float, std::optional<Temperature>, std::optional<Matrix>>(),
             nb::kw_only(), nb::arg("norm").noconvert(), nb::arg("low").none(), nb::arg("low_gain").noconvert().none(),
             nb::arg("q"), nb::arg("kv"), nb::arg("kv_gain").noconvert(), nb::arg("k_up"), nb::arg("v_up"),
             nb::arg("output"), nb::arg("epsilon"), nb::arg("scale"), nb::arg("temperature").none(),
             nb::arg("gate").none());
    core.def("multiply_heads", &multiply_heads, nb::arg("weights"), nb::arg("x").noconvert(), nb::arg("out").noconvert(),
             "out[t, h] = x[t, h] times the transposed weights[h].")
        .def("prepare_latent", &prepare_latent, nb::arg("q").noconvert(), nb::arg("kv").noconvert(),
             nb::arg("gain").noconvert(), nb::arg("epsilon"), nb::arg("cosines").noconvert(),
             nb::arg("sines").noconvert(), nb::arg("cache_type"), nb::arg("block_tokens"), nb::arg("keys").noconvert(),
             nb::arg("slots").noconvert(),
             "Turns the last numbers of q's heads in place; the norm and rotary embedding of kv into its slots.")
        .def("index_scores", &index_scores, nb::arg("q").noconvert(), nb::arg("weights").noconvert(),
             nb::arg("block_table").noconvert(), nb::arg("cache_type"), nb::arg("block_tokens"),
             nb::arg("rows").noconvert(), nb::arg("step"), nb::arg("clips"), nb::arg("out").noconvert(),
             "out[t, n] = the sum over heads of weights[t] times max(0, q[t] . row n * step + step - 1), or the product itself.")
        .def("expanded_attention", &expanded_attention, nb::arg("k_up"), nb::arg("v_up"), nb::arg("q").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("starts").noconvert(), nb::arg("block_tables").noconvert(),
             nb::arg("table_starts").noconvert(), nb::arg("cache_type"), nb::arg("block_tokens"),
             nb::arg("keys").noconvert(), nb::arg("scale"), nb::arg("temperature").none(), nb::arg("prompt"), nb::arg("out").noconvert(),
             "Causal attention over keys and values of heads, which are made of a latent cache's rows.")
        .def("latent_attention", &latent_attention, nb::arg("q").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("starts").noconvert(), nb::arg("block_tables").noconvert(), nb::arg("table_starts").noconvert(),
             nb::arg("cache_type"), nb::arg("block_tokens"), nb::arg("keys").noconvert(), nb::arg("scale"),
             nb::arg("softcap"), nb::arg("window"), nb::arg("sinks").noconvert().none(), nb::arg("chunked"),
             nb::arg("temperature").none(), nb::arg("prompt"), nb::arg("out").noconvert(),
             "Causal attention over a cache whose values are the first numbers of its keys.");
}

}  // namespace thermocline::python
