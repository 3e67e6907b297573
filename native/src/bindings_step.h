// Layers with what they compute with, and a step's inputs for all of them: checked and kept alive for those who run steps.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "layer_weights.h"
#include "thermocline/step.h"

namespace thermocline::python {

// A layer with its cache or its states, checked and kept alive.
class PlacedWeights {
   public:
    PlacedWeights(const LayerWeights& weights, std::optional<Experts> slots, int64_t rope, int64_t places)
        : weights_(weights), slots_(std::move(slots)) {
        require(rope >= 0 && rope < 1024 && places >= 0 && places < 1024, "a layer's tables and places count from 0");
        given_.rope = rope;
        given_.places = places;
        if (!slots_) return;
        const Layer& layer = weights_.layer();
        require(layer.is_routed, "a layer without routed experts has no slots");
        require(slots_->up.cols() == layer.hidden && slots_->up.rows() == layer.experts.up.first.rows,
                "a slot has the sizes of an expert");
        require(slots_->stacked.activation == layer.experts.activation &&
                    slots_->stacked.limits == layer.experts.limits &&
                    slots_->biases.empty() == (layer.experts.down_bias.first == nullptr),
                "a slot has the formula of an expert");
        given_.slots = {slots_->up.size(), slots_->stacked};
    }

    void attends(int type, int64_t block_tokens, int64_t head_dim, Write<uint8_t, 3> keys, Write<uint8_t, 3> values);
    void recurs(ConvStates conv_states, States states);

    PlacedLayer given() const {
        const int has_memory = (given_.cache.keys != nullptr) + (given_.conv_states != nullptr);
        require(has_memory == (weights_.has_mixer() ? 1 : 0), "a layer with a mixer attends or recurs");
        PlacedLayer layer = given_;
        layer.layer = &weights_.layer();
        return layer;
    }
    const LayerWeights& weights() const { return weights_; }
    int64_t num_states() const { return num_states_; }

   private:
    LayerWeights weights_;
    std::optional<Experts> slots_;
    PlacedLayer given_{};
    std::vector<Write<uint8_t, 3>> arrays_;
    std::optional<ConvStates> conv_;
    std::optional<States> recurrent_;
    int64_t num_states_ = 0;
};

using PlacedLayers = std::vector<std::shared_ptr<PlacedWeights>>;
using RopeArrays = std::tuple<In<float, 2>, In<float, 2>, bool>;
using PlaceArrays = std::tuple<In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 1>, In<int32_t, 1>>;

// A step's arrays, kept alive, and what is read of them.
struct StepArrays {
    In<float, 2> x;
    In<int32_t, 1> positions;
    std::vector<RopeArrays> ropes;
    std::vector<PlaceArrays> places;
    std::optional<In<float, 3>> embedded;
    StepInputs inputs{};

    StepArrays(In<float, 2> rows, In<int32_t, 1> at, std::vector<RopeArrays> tables, std::vector<PlaceArrays> caches,
               const In<int32_t, 2>& runs, std::optional<In<float, 3>> embeddings);
};

// Every layer must find what the step gives, within its own cache or states.
void require_step(const PlacedLayers& layers, const StepInputs& inputs);

}  // namespace thermocline::python
