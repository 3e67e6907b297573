// A chunk of few tokens through all layers as one job: what the layers compute with, and what a step gives them.
#pragma once

#include <cstdint>
#include <vector>

#include "thermocline/expert_groups.h"
#include "thermocline/layer.h"

namespace thermocline {

// What a layer computes with, wherever the step's tokens are. slots: a device's, one after another; none on the CPU.
struct PlacedLayer {
    const Layer* layer;
    LayerCacheView cache;               // where it attends; no keys in other layers
    float *conv_states, *states;        // where it is recurrent; a layer may have neither cache nor states
    int64_t rope, places;               // which of the step's tables and places are its own
    ExpertStacks slots;
};

struct StepRope {
    const float* cosines;  // [positions, rotary_dims / 2], of all positions up to the step's last
    const float* sines;
    int64_t positions, rotary_dims;
    RopeLayout layout;
};

struct StepPlaces {
    const int32_t* slots;         // [rows], where keys and values go
    const int32_t* starts;        // see LayerTokens
    const int32_t* block_tables;
    const int32_t* table_starts;
    int64_t sequences;
    const int32_t* expanded = nullptr;
};

// A step's inputs, by reference: they stay until it ends.
struct StepInputs {
    int64_t rows;
    const float* x;  // [rows, hidden]
    const int32_t* positions;
    std::vector<StepRope> ropes;
    std::vector<StepPlaces> places;
    std::vector<StateRun> runs;
    std::vector<int64_t> copies;
    const float* embedded = nullptr;  // [layers, rows, width of the layers' embeddings], where they have some
    int64_t embedded_width = 0;
};

// The rows of a step's tables that its tokens turn by.
class StepTurns {
   public:
    void look_up(const StepInputs& inputs);
    const float* cosines(int64_t rope) const { return cosines_[static_cast<size_t>(rope)].data(); }
    const float* sines(int64_t rope) const { return sines_[static_cast<size_t>(rope)].data(); }

   private:
    std::vector<std::vector<float>> cosines_, sines_;
};

// A step's tokens as a layer that attends takes them, or one that is recurrent.
LayerTokens tokens_of(const PlacedLayer& layer, const StepInputs& inputs, const StepTurns& turns);
StateTokens states_of(const PlacedLayer& layer, const StepInputs& inputs);

struct StepSpan {
    int64_t begin, end;  // nanoseconds of CLOCK_MONOTONIC
};

// Computes all layers one after the other, as run_layer does. ids, weights: [layers that are routed, rows, chosen], the
// same number everywhere; out: [rows, hidden]; spans: [layers].
void run_step(const Compute& compute, const Dense& dense, const std::vector<PlacedLayer>& layers,
              const StepInputs& inputs, float* out, int32_t* ids, float* weights, StepSpan* spans);

}  // namespace thermocline
