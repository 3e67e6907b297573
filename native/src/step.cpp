#include "thermocline/step.h"

#include <algorithm>

#include "monotonic.h"
#include "scratch.h"

namespace thermocline {

void StepTurns::look_up(const StepInputs& inputs) {
    const size_t count = inputs.ropes.size();
    cosines_.resize(count);
    sines_.resize(count);
    for (size_t n = 0; n < count; ++n) {
        const StepRope& rope = inputs.ropes[n];
        const int64_t width = rope.rotary_dims / 2;
        cosines_[n].resize(static_cast<size_t>(inputs.rows * width));
        sines_[n].resize(cosines_[n].size());
        for (int64_t row = 0; row < inputs.rows; ++row) {
            std::copy_n(rope.cosines + inputs.positions[row] * width, width, cosines_[n].data() + row * width);
            std::copy_n(rope.sines + inputs.positions[row] * width, width, sines_[n].data() + row * width);
        }
    }
}

LayerTokens tokens_of(const PlacedLayer& layer, const StepInputs& inputs, const StepTurns& turns) {
    const StepRope& rope = inputs.ropes[static_cast<size_t>(layer.rope)];
    const StepPlaces& places = inputs.places[static_cast<size_t>(layer.places)];
    return {inputs.rows,      inputs.positions, places.slots,        turns.cosines(layer.rope), turns.sines(layer.rope),
            rope.rotary_dims, rope.layout,      places.starts,       places.block_tables,
            places.table_starts, places.sequences, places.expanded};
}

StateTokens states_of(const PlacedLayer& layer, const StepInputs& inputs) {
    return {inputs.rows, inputs.runs.data(), inputs.copies.data(), static_cast<int64_t>(inputs.runs.size()),
            layer.conv_states, layer.states};
}

void run_step(const Compute& compute, const Dense& dense, const std::vector<PlacedLayer>& layers,
              const StepInputs& inputs, float* out, int32_t* ids, float* weights, StepSpan* spans) {
    thread_local Scratch memory;
    thread_local StepTurns turns;
    turns.look_up(inputs);
    const int64_t wide = inputs.rows * layers.front().layer->hidden;
    float* const between = memory.get<float>(2 * wide);
    const float* x = inputs.x;
    for (size_t n = 0; n < layers.size(); ++n) {
        const PlacedLayer& placed = layers[n];
        const Layer& layer = *placed.layer;
        float* const to = n + 1 == layers.size() ? out : between + static_cast<int64_t>(n % 2) * wide;
        spans[n].begin = now_ns();
        if (placed.conv_states != nullptr) {
            run_layer(compute, dense, Form::Decode, layer, states_of(placed, inputs), x, to, ids, weights, {});
        } else if (placed.cache.keys != nullptr) {
            LayerTokens tokens = tokens_of(placed, inputs, turns);
            if (layer.embedding.exists)
                tokens.embedded = inputs.embedded + static_cast<int64_t>(n) * inputs.rows * inputs.embedded_width;
            run_layer(compute, dense, Form::Decode, layer, tokens, placed.cache, x, to, ids, weights, {});
        } else {
            run_layer(compute, dense, Form::Decode, layer, inputs.rows, x, to, ids, weights, {});
        }
        spans[n].end = now_ns();
        x = to;
        if (!layer.is_routed) continue;
        ids += inputs.rows * layer.router.rule.chosen;
        weights += inputs.rows * layer.router.rule.chosen;
    }
}

}  // namespace thermocline
