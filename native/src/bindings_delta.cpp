// What Python sees of the gated delta rule: checks shapes and ranges, then runs without the GIL.
#include "bindings_delta.h"

#include <utility>

namespace thermocline::python {

DeltaRule::DeltaRule(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, bool tiled,
                     bool by_channel, In<float, 2> conv, Vector step_bias, Vector decay, Vector gain, float epsilon,
                     bool sigmoid_gate, float lower_bound)
    : shape_{key_heads, value_heads, key_dim, value_dim, size(conv, 0), tiled, by_channel},
      conv_(std::move(conv)),
      step_bias_(std::move(step_bias)),
      decay_(std::move(decay)),
      gain_(std::move(gain)),
      epsilon_(epsilon),
      sigmoid_gate_(sigmoid_gate),
      lower_bound_(lower_bound) {
    require(lower_bound <= 0.0f, "the lower bound of a decay's logarithm is negative, or 0 for none");
    require(key_heads > 0 && value_heads > 0 && key_dim > 0 && value_dim > 0, "sizes must be positive");
    require(value_heads % key_heads == 0, "value heads must be a multiple of key heads");
    require(shape_.conv_width >= 2 && size(conv_, 1) == shape_.channels(), "conv must be [at least 2, channels]");
    require(size(step_bias_, 0) == shape_.steps(), "step_bias must have an entry per number of alpha");
    require(size(decay_, 0) == value_heads, "decay must have an entry per value head");
    require(size(gain_, 0) == value_dim, "gain must have value_dim entries");
}

DeltaJob DeltaRule::job() const {
    DeltaJob job{};
    job.shape = shape_;
    job.conv = conv_.data();
    job.step_bias = step_bias_.data();
    job.decay = decay_.data();
    job.gain = gain_.data();
    job.epsilon = epsilon_;
    job.sigmoid_gate = sigmoid_gate_;
    job.lower_bound = lower_bound_;
    return job;
}

void require_states(const StateSizes& sizes, const ConvStates& conv_states, const States& states) {
    require(size(conv_states, 1) == sizes.kept && size(conv_states, 2) == sizes.channels,
            "conv_states must be [slots, conv_width - 1, channels]");
    require(size(states, 0) == size(conv_states, 0) && size(states, 1) == sizes.heads &&
                size(states, 2) == sizes.rows && size(states, 3) == sizes.columns,
            "states must be [slots, value_heads, key_dim, value_dim]");
}

void set_states(DeltaJob& job, const ConvStates& conv_states, const States& states) {
    require_states(job.shape.state(), conv_states, states);
    job.conv_states = conv_states.data();
    job.states = states.data();
}

std::vector<StateRun> state_runs(const In<int32_t, 2>& runs, int64_t tokens, int64_t slots) {
    require(size(runs, 1) == 3, "runs must be [runs, 3]");
    std::vector<StateRun> found;
    int64_t end = 0;
    for (int64_t r = 0; r < size(runs, 0); ++r) {
        const int32_t* row = runs.data() + 3 * r;
        require(row[0] >= end && row[1] >= 0 && row[0] + row[1] <= tokens, "runs must follow each other");
        require(row[2] >= 0 && row[2] < slots, "a slot lies beyond the states");
        for (const StateRun& other : found) require(other.slot != row[2], "two runs have one slot");
        end = row[0] + row[1];
        if (row[1] > 0) found.push_back({row[0], row[1], row[2]});
    }
    return found;
}

namespace {

void delta_rule(Core& core, const DeltaRule& rule, In<float, 2> mixed, In<float, 2> z, In<float, 2> alpha,
                In<float, 2> beta, In<int32_t, 2> runs, ConvStates conv_states, States states, Write<float, 2> out) {
    const DeltaShape& s = rule.shape();
    const int64_t tokens = size(mixed, 0), width = s.value_heads * s.value_dim;
    require(size(mixed, 1) == s.channels(), "mixed must be [tokens, channels]");
    require(size(alpha, 0) == tokens && size(alpha, 1) == s.steps(), "alpha must be [tokens, steps]");
    require(size(beta, 0) == tokens && size(beta, 1) == s.value_heads, "beta must be [tokens, value_heads]");
    require(size(z, 0) == tokens && size(z, 1) == width && size(out, 0) == tokens && size(out, 1) == width,
            "z and out must be [tokens, value_heads * value_dim]");
    DeltaJob job = rule.job();
    set_states(job, conv_states, states);
    const std::vector<StateRun> found = state_runs(runs, tokens, size(states, 0));
    job.mixed = mixed.data();
    job.z = z.data();
    job.alpha = alpha.data();
    job.beta = beta.data();
    job.runs = found.data();
    job.num_runs = static_cast<int64_t>(found.size());
    job.out = out.data();
    const WithoutGil unlocked;
    thermocline::delta_rule(core.dense(), job);
}

}  // namespace

void bind_delta(nb::module_& m, nb::class_<Core>& core) {
    nb::class_<DeltaRule>(m, "DeltaRule", "The numbers of a gated delta rule other than its products'.")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, bool, bool, In<float, 2>, DeltaRule::Vector,
                      DeltaRule::Vector, DeltaRule::Vector, float, bool, float>(),
             nb::kw_only(), nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_dim"), nb::arg("value_dim"),
             nb::arg("tiled"), nb::arg("by_channel"), nb::arg("conv").noconvert(), nb::arg("step_bias").noconvert(),
             nb::arg("decay").noconvert(), nb::arg("gain").noconvert(), nb::arg("epsilon"),
             nb::arg("sigmoid_gate"), nb::arg("lower_bound"));
    core.def("delta_rule", &delta_rule, nb::arg("rule"), nb::arg("mixed").noconvert(), nb::arg("z").noconvert(),
             nb::arg("alpha").noconvert(), nb::arg("beta").noconvert(), nb::arg("runs").noconvert(),
             nb::arg("conv_states").noconvert(), nb::arg("states").noconvert(), nb::arg("out").noconvert(),
             "The gated delta rule over some sequences' tokens, whose states it moves on.");
}

}  // namespace thermocline::python
