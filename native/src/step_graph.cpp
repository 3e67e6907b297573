#include "thermocline/step_graph.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "monotonic.h"
#include "thermocline/relax.h"

namespace thermocline {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

StepGraph::StepGraph(Compute compute, Dense dense, HandoffPage& page, std::vector<PlacedLayer> layers,
                     double nanoseconds_per_byte)
    : compute_(compute),
      dense_(dense),
      page_(page),
      layers_(std::move(layers)),
      nanoseconds_per_byte_(nanoseconds_per_byte) {
    int64_t experts = 0;
    for (size_t n = 0; n < layers_.size(); ++n) {
        const auto layer = static_cast<int64_t>(n);
        nodes_.push_back({GraphNode::Attend, layer});
        nodes_.push_back({GraphNode::Route, layer});
        if (!layers_[n].layer->is_routed) continue;
        experts = std::max(experts, layers_[n].layer->router.matrix.rows);
        for (const GraphNode node : {GraphNode::Publish, GraphNode::Hot, GraphNode::Wait, GraphNode::Combine})
            nodes_.push_back({node, layer});
    }
    const HandoffShape& shape = page.shape();
    const int64_t pairs = shape.rows * shape.chosen, wide = shape.rows * shape.hidden;
    memory_.resize(static_cast<size_t>(5 * wide + shape.rows * experts + pairs + pairs * shape.hidden));
    x_ = memory_.data();
    residual_ = x_ + wide;
    normed_ = residual_ + wide;
    kept_ = normed_ + wide;
    outputs_ = kept_ + 2 * wide;
    logits_ = outputs_ + pairs * shape.hidden;
    weights_ = logits_ + shape.rows * experts;
    ids_.resize(static_cast<size_t>(pairs));
    slots_.resize(ids_.size());
    sources_.resize(ids_.size());
    spans_.resize(nodes_.size());
}

HandoffEnd StepGraph::run(const GraphInputs& inputs, uint32_t epoch, const HandoffPatience& patience) {
    inputs_ = &inputs;
    epoch_ = epoch;
    patience_ = patience;
    const int64_t wide = inputs.rows * page_.shape().hidden * static_cast<int64_t>(sizeof(float));
    page_.begun_flag().store(epoch, std::memory_order_release);
    move(wide);
    std::memcpy(x_, inputs.x, static_cast<size_t>(wide));
    turns_.look_up(inputs);
    for (size_t n = 0; n < nodes_.size(); ++n) {
        spans_[n] = {now_ns(), 0, static_cast<int64_t>(nodes_[n].node), nodes_[n].layer, 0};
        const HandoffEnd end = run_node(nodes_[n]);
        if (end != HandoffEnd::Done) {
            abort_step(page_, epoch);
            return end;
        }
        spans_[n].end = now_ns();
        if (nodes_[n].node == GraphNode::Hot) spans_[n].pairs = hot_.pairs();
        if (nodes_[n].node == GraphNode::Wait) spans_[n].pairs = num_cold_;
    }
    move(wide);
    page_.ended_flag().store(epoch, std::memory_order_release);
    return HandoffEnd::Done;
}

HandoffEnd StepGraph::run_node(const Recorded& recorded) {
    const int64_t layer = recorded.layer;
    switch (recorded.node) {
        case GraphNode::Attend:
            attend(layer);
            break;
        case GraphNode::Route:
            choose_experts(compute_, dense_, Form::Decode, *layers_[static_cast<size_t>(layer)].layer, inputs_->rows,
                           residual_, normed_, logits_, kept_, ids_.data(), weights_);
            if (!layers_[static_cast<size_t>(layer)].layer->is_routed) std::swap(x_, residual_);
            break;
        case GraphNode::Publish:
            publish(layer);
            break;
        case GraphNode::Hot:
            return compute_hot(layer) ? HandoffEnd::Done : HandoffEnd::BadPage;
        case GraphNode::Wait:
            return wait_served(page_, layer, epoch_, patience_);
        case GraphNode::Combine:
            return combine(layer) ? HandoffEnd::Done : HandoffEnd::BadPage;
    }
    return HandoffEnd::Done;
}

void StepGraph::attend(int64_t index) {
    const PlacedLayer& given = layers_[static_cast<size_t>(index)];
    const GraphInputs& step = *inputs_;
    const Layer& layer = *given.layer;
    if (given.conv_states != nullptr) {
        const StateTokens tokens = states_of(given, step);
        if (layer.recurrent.kind == RecurrentPart::Kind::Nothing)
            apply_delta(compute_, dense_, Form::Decode, layer.delta, tokens, x_, residual_);
        else
            apply_recurrent(compute_, dense_, Form::Decode, layer.recurrent, tokens, x_, residual_);
        return;
    }
    if (given.cache.keys == nullptr) {  // a feed-forward alone
        std::swap(x_, residual_);
        return;
    }
    const LayerTokens tokens = tokens_of(given, step, turns_);
    if (layer.is_latent)
        thermocline::attend(compute_, dense_, Form::Decode, layer.latent, tokens, given.cache, x_, residual_);
    else
        thermocline::attend(compute_, dense_, Form::Decode, layer, tokens, given.cache, x_, residual_, normed_);
}

void StepGraph::publish(int64_t layer) {
    const int64_t pairs = inputs_->rows * page_.shape().chosen;
    const int32_t* slot_of = inputs_->residency + layer * inputs_->experts;
    int64_t num_cold = 0;
    for (int64_t pair = 0; pair < pairs; ++pair) {
        slots_[static_cast<size_t>(pair)] = slot_of[ids_[static_cast<size_t>(pair)]];
        num_cold += slots_[static_cast<size_t>(pair)] < 0;
    }
    const int64_t x_bytes = num_cold > 0 ? inputs_->rows * page_.shape().hidden * 4 : 0;
    move(x_bytes + pairs * 8);
    num_cold_ = thermocline::publish(page_, layer, epoch_, {normed_, ids_.data(), weights_, slots_.data(), inputs_->rows});
}

bool StepGraph::compute_hot(int64_t layer) {
    const HandoffShape& shape = page_.shape();
    if (!hot_.sort(layers_[static_cast<size_t>(layer)].slots, inputs_->rows, shape.chosen, slots_.data(), weights_))
        return false;
    if (hot_.pairs() > 0)
        expert_outputs(compute_, Form::Decode, hot_.work(normed_, inputs_->rows, shape.hidden), outputs_);
    return true;
}

bool StepGraph::combine(int64_t layer) {
    const HandoffShape& shape = page_.shape();
    move(num_cold_ * shape.hidden * static_cast<int64_t>(sizeof(float)));
    for (int64_t pair = 0; pair < inputs_->rows * shape.chosen; ++pair) {
        const bool is_cold = slots_[static_cast<size_t>(pair)] < 0;
        const int64_t place = page_.place()[pair];
        if (is_cold && (place < 0 || place >= num_cold_)) return false;
        const float* from = is_cold ? page_.out() + place * shape.hidden
                                    : outputs_ + hot_.pair_of()[pair] * shape.hidden;
        sources_[static_cast<size_t>(pair)] = from;
    }
    const CombineJob job{residual_, sources_.data(), inputs_->rows, shape.chosen, shape.hidden, x_};
    dense_.kernels.combine(job, 0, inputs_->rows);
    finish_layer(dense_, *layers_[static_cast<size_t>(layer)].layer, inputs_->rows, kept_, x_, x_);
    return true;
}

void StepGraph::move(int64_t bytes) const {
    const auto until = Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(nanoseconds_per_byte_ * static_cast<double>(bytes)));
    while (Clock::now() < until) relax();
}

}  // namespace thermocline
