// The gated delta rule's weights and states as Python hands them over; the layer's bindings take them too.
#pragma once

#include "bindings_checks.h"
#include "thermocline/delta.h"

#include <vector>

namespace thermocline::python {

// The rule's own numbers, checked against its shape once, and kept alive.
class DeltaRule {
   public:
    using Vector = In<float, 1>;

    DeltaRule(int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, bool tiled,
              bool by_channel, In<float, 2> conv, Vector step_bias, Vector decay, Vector gain, float epsilon,
              bool sigmoid_gate, float lower_bound);

    const DeltaShape& shape() const { return shape_; }
    // The job but for its inputs, output and states.
    DeltaJob job() const;

   private:
    DeltaShape shape_{};
    In<float, 2> conv_;
    Vector step_bias_, decay_, gain_;
    float epsilon_;
    bool sigmoid_gate_;
    float lower_bound_;
};

// conv_states [slots, conv_width - 1, channels] and states [slots, value_heads, key_dim, value_dim] for a job.
using ConvStates = Write<float, 3>;
using States = Write<float, 4>;
void require_states(const StateSizes& sizes, const ConvStates& conv_states, const States& states);
void set_states(DeltaJob& job, const ConvStates& conv_states, const States& states);

// Rows of (first row, tokens, slot), int32 [runs, 3], within `tokens` rows and `slots` slots, in order.
std::vector<StateRun> state_runs(const In<int32_t, 2>& runs, int64_t tokens, int64_t slots);

}  // namespace thermocline::python
