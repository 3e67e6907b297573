// What Python sees of short convolutions, Mamba2 and the first Mamba: checks shapes and ranges, then runs without the GIL.
#include "bindings_recurrent.h"

#include <utility>

namespace thermocline::python {

ShortConvRule::ShortConvRule(In<float, 2> conv) : conv_(std::move(conv)) {
    require(size(conv_, 0) >= 2 && size(conv_, 1) >= 1, "conv must be [at least 2, channels]");
}

ShortConvJob ShortConvRule::job() const {
    ShortConvJob job{};
    job.width = size(conv_, 0);
    job.channels = size(conv_, 1);
    job.conv = conv_.data();
    return job;
}

MambaRule::MambaRule(int64_t heads, int64_t head_dim, int64_t groups, int64_t state_dim, In<float, 2> conv,
                     Vector conv_bias, Vector step_bias, Vector decay, Vector skip, Vector gain, float epsilon)
    : shape_{heads, head_dim, groups, state_dim, size(conv, 0)},
      conv_(std::move(conv)),
      conv_bias_(std::move(conv_bias)),
      step_bias_(std::move(step_bias)),
      decay_(std::move(decay)),
      skip_(std::move(skip)),
      gain_(std::move(gain)),
      epsilon_(epsilon) {
    require(heads > 0 && head_dim > 0 && groups > 0 && state_dim > 0, "sizes must be positive");
    require(heads % groups == 0, "heads must be a multiple of groups");
    require(shape_.conv_width >= 2 && size(conv_, 1) == shape_.channels(), "conv must be [at least 2, channels]");
    require(size(conv_bias_, 0) == shape_.channels(), "conv_bias must have an entry per channel");
    for (const Vector* vector : {&step_bias_, &decay_, &skip_})
        require(size(*vector, 0) == heads, "step_bias, decay and skip must have an entry per head");
    require(size(gain_, 0) == shape_.width(), "gain must have heads * head_dim entries");
}

MambaJob MambaRule::job() const {
    MambaJob job{};
    job.shape = shape_;
    job.conv = conv_.data();
    job.conv_bias = conv_bias_.data();
    job.step_bias = step_bias_.data();
    job.decay = decay_.data();
    job.skip = skip_.data();
    job.gain = gain_.data();
    job.epsilon = epsilon_;
    return job;
}

SelectiveRule::SelectiveRule(In<float, 2> conv, Vector conv_bias, Vector step_bias, In<float, 2> decay, Vector skip)
    : shape_{size(conv, 1), size(decay, 0), size(conv, 0)},
      conv_(std::move(conv)),
      conv_bias_(std::move(conv_bias)),
      step_bias_(std::move(step_bias)),
      decay_(std::move(decay)),
      skip_(std::move(skip)) {
    require(shape_.conv_width >= 2 && shape_.width >= 1, "conv must be [at least 2, columns]");
    require(shape_.state_dim >= 1 && size(decay_, 1) == shape_.width, "decay must be [at least 1, columns]");
    for (const Vector* vector : {&conv_bias_, &step_bias_, &skip_})
        require(size(*vector, 0) == shape_.width, "conv_bias, step_bias and skip must have an entry per column");
}

SelectiveJob SelectiveRule::job() const {
    SelectiveJob job{};
    job.shape = shape_;
    job.conv = conv_.data();
    job.conv_bias = conv_bias_.data();
    job.step_bias = step_bias_.data();
    job.decay = decay_.data();
    job.skip = skip_.data();
    return job;
}

namespace {

void short_convolution(Core& core, const ShortConvRule& rule, In<float, 2> rows, In<int32_t, 2> runs,
                       ConvStates conv_states, Write<float, 2> out) {
    ShortConvJob job = rule.job();
    const int64_t tokens = size(rows, 0);
    require(size(rows, 1) == 3 * job.channels, "rows must be [tokens, 3 * channels]");
    require(size(out, 0) == tokens && size(out, 1) == job.channels, "out must be [tokens, channels]");
    require(size(conv_states, 1) == job.width - 1 && size(conv_states, 2) == job.channels,
            "conv_states must be [slots, conv_width - 1, channels]");
    const std::vector<StateRun> found = state_runs(runs, tokens, size(conv_states, 0));
    job.rows = rows.data();
    job.runs = found.data();
    job.num_runs = static_cast<int64_t>(found.size());
    job.conv_states = conv_states.data();
    job.out = out.data();
    const WithoutGil unlocked;
    thermocline::short_convolution(core.dense(), job);
}

void mamba(Core& core, const MambaRule& rule, In<float, 2> rows, In<int32_t, 2> runs, ConvStates conv_states,
           States states, Write<float, 2> out) {
    MambaJob job = rule.job();
    const int64_t tokens = size(rows, 0);
    require(size(rows, 1) == job.shape.row(), "rows must be [tokens, numbers of a token's row]");
    require(size(out, 0) == tokens && size(out, 1) == job.shape.width(), "out must be [tokens, heads * head_dim]");
    require_states(job.shape.state(), conv_states, states);
    const std::vector<StateRun> found = state_runs(runs, tokens, size(conv_states, 0));
    job.rows = rows.data();
    job.runs = found.data();
    job.num_runs = static_cast<int64_t>(found.size());
    job.conv_states = conv_states.data();
    job.states = states.data();
    job.out = out.data();
    const WithoutGil unlocked;
    thermocline::mamba(core.dense(), job);
}

void selective_convolution(Core& core, const SelectiveRule& rule, In<float, 2> rows, In<int32_t, 2> runs,
                           ConvStates conv_states, Write<float, 2> out) {
    SelectiveJob job = rule.job();
    const int64_t tokens = size(rows, 0), width = job.shape.width;
    require(size(rows, 1) == job.shape.row(), "rows must be [tokens, 2 * columns]");
    require(size(out, 0) == tokens && size(out, 1) == width, "out must be [tokens, columns]");
    require(size(conv_states, 1) == job.shape.conv_width - 1 && size(conv_states, 2) == width,
            "conv_states must be [slots, conv_width - 1, columns]");
    const std::vector<StateRun> found = state_runs(runs, tokens, size(conv_states, 0));
    job.rows = rows.data();
    job.runs = found.data();
    job.num_runs = static_cast<int64_t>(found.size());
    job.conv_states = conv_states.data();
    job.out = out.data();
    const WithoutGil unlocked;
    thermocline::selective_convolution(core.dense(), job);
}

void selective_scan(Core& core, const SelectiveRule& rule, In<float, 2> rows, In<float, 2> convolved,
                    In<float, 2> steps, In<float, 2> keys, In<float, 2> queries, In<int32_t, 2> runs, States states,
                    Write<float, 2> out) {
    SelectiveJob job = rule.job();
    const int64_t tokens = size(rows, 0), width = job.shape.width, state_dim = job.shape.state_dim;
    require(size(rows, 1) == job.shape.row(), "rows must be [tokens, 2 * columns]");
    const auto require_columns = [&](const auto& array, int64_t columns, const char* what) {
        require(size(array, 0) == tokens && size(array, 1) == columns, what);
    };
    require_columns(convolved, width, "convolved must be [tokens, columns]");
    require_columns(steps, width, "steps must be [tokens, columns]");
    require_columns(keys, state_dim, "keys must be [tokens, state_dim]");
    require_columns(queries, state_dim, "queries must be [tokens, state_dim]");
    require_columns(out, width, "out must be [tokens, columns]");
    require(size(states, 1) == 1 && size(states, 2) == state_dim && size(states, 3) == width,
            "states must be [slots, 1, state_dim, columns]");
    const std::vector<StateRun> found = state_runs(runs, tokens, size(states, 0));
    job.rows = rows.data();
    job.convolved = convolved.data();
    job.steps = steps.data();
    job.keys = keys.data();
    job.queries = queries.data();
    job.runs = found.data();
    job.num_runs = static_cast<int64_t>(found.size());
    job.states = states.data();
    job.out = out.data();
    const WithoutGil unlocked;
    thermocline::selective_scan(core.dense(), job);
}

}  // namespace

void bind_recurrent(nb::module_& m, nb::class_<Core>& core) {
    nb::class_<ShortConvRule>(m, "ShortConvRule", "The numbers of a short convolution other than its products'.")
        .def(nb::init<In<float, 2>>(), nb::arg("conv").noconvert());
    nb::class_<MambaRule>(m, "MambaRule", "The numbers of Mamba2 other than its products'.")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, In<float, 2>, MambaRule::Vector, MambaRule::Vector,
                      MambaRule::Vector, MambaRule::Vector, MambaRule::Vector, float>(),
             nb::kw_only(), nb::arg("heads"), nb::arg("head_dim"), nb::arg("groups"), nb::arg("state_dim"),
             nb::arg("conv").noconvert(), nb::arg("conv_bias").noconvert(), nb::arg("step_bias").noconvert(),
             nb::arg("decay").noconvert(), nb::arg("skip").noconvert(), nb::arg("gain").noconvert(),
             nb::arg("epsilon"));
    nb::class_<SelectiveRule>(m, "SelectiveRule", "The numbers of the first Mamba other than its products'.")
        .def(nb::init<In<float, 2>, SelectiveRule::Vector, SelectiveRule::Vector, In<float, 2>, SelectiveRule::Vector>(),
             nb::kw_only(), nb::arg("conv").noconvert(), nb::arg("conv_bias").noconvert(),
             nb::arg("step_bias").noconvert(), nb::arg("decay").noconvert(), nb::arg("skip").noconvert());
    core.def("short_convolution", &short_convolution, nb::arg("rule"), nb::arg("rows").noconvert(),
             nb::arg("runs").noconvert(), nb::arg("conv_states").noconvert(), nb::arg("out").noconvert(),
             "A short convolution over some sequences' tokens, whose states it moves on.")
        .def("mamba", &mamba, nb::arg("rule"), nb::arg("rows").noconvert(), nb::arg("runs").noconvert(),
             nb::arg("conv_states").noconvert(), nb::arg("states").noconvert(), nb::arg("out").noconvert(),
             "Mamba2 over some sequences' tokens, whose states it moves on.")
        .def("selective_convolution", &selective_convolution, nb::arg("rule"), nb::arg("rows").noconvert(),
             nb::arg("runs").noconvert(), nb::arg("conv_states").noconvert(), nb::arg("out").noconvert(),
             "What the first Mamba's convolution gives of some sequences' tokens; moves its states on.")
        .def("selective_scan", &selective_scan, nb::arg("rule"), nb::arg("rows").noconvert(),
             nb::arg("convolved").noconvert(), nb::arg("steps").noconvert(), nb::arg("keys").noconvert(),
             nb::arg("queries").noconvert(), nb::arg("runs").noconvert(), nb::arg("states").noconvert(),
             nb::arg("out").noconvert(),
             "The first Mamba behind its products, over some sequences' tokens, whose states it moves on.");
}

}  // namespace thermocline::python
