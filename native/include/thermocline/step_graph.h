// A device that a thread of this process plays: it runs a recorded list of nodes, one decode step at a time, and shares
// the experts of each layer with the CPU as handoff.h says. Its link has a speed; its compute takes what one
// thread takes.
#pragma once

#include <cstdint>
#include <vector>

#include "thermocline/handoff.h"
#include "thermocline/step.h"

namespace thermocline {

// A step's inputs, and where each expert is.
struct GraphInputs : StepInputs {
    const int32_t* residency;  // [layers, experts], the slot of each expert, or below zero
    int64_t experts;
};

enum class GraphNode : int32_t { Attend, Route, Publish, Hot, Wait, Combine };

struct NodeSpan {
    int64_t begin, end;  // nanoseconds of CLOCK_MONOTONIC
    int64_t node, layer;
    int64_t pairs;  // that it computed or waited for
};

class StepGraph {
   public:
    // page: with a row for each of the most tokens of a step. nanoseconds_per_byte: of the link.
    StepGraph(Compute compute, Dense dense, HandoffPage& page, std::vector<PlacedLayer> layers,
              double nanoseconds_per_byte);

    // Computes a step; `output` has x [rows, hidden] behind the last layer if that is Done.
    HandoffEnd run(const GraphInputs& inputs, uint32_t epoch, const HandoffPatience& patience);
    const float* output() const { return x_; }
    // Of the last step.
    const std::vector<NodeSpan>& spans() const { return spans_; }
    int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }

   private:
    struct Recorded {
        GraphNode node;
        int64_t layer;
    };
    HandoffEnd run_node(const Recorded& node);
    void attend(int64_t layer);
    void publish(int64_t layer);
    bool compute_hot(int64_t layer);
    bool combine(int64_t layer);
    void move(int64_t bytes) const;

    Compute compute_;
    Dense dense_;
    HandoffPage& page_;
    std::vector<PlacedLayer> layers_;
    std::vector<Recorded> nodes_;
    double nanoseconds_per_byte_;
    std::vector<NodeSpan> spans_;
    ExpertGroups hot_;
    std::vector<float> memory_;
    std::vector<int32_t> ids_, slots_;
    std::vector<const float*> sources_;
    StepTurns turns_;
    float *x_, *residual_, *normed_, *kept_, *logits_, *weights_, *outputs_;
    // Of the step that runs.
    const GraphInputs* inputs_ = nullptr;
    uint32_t epoch_ = 0;
    HandoffPatience patience_;
    int64_t num_cold_ = 0;
};

}  // namespace thermocline
