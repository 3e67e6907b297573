// What the files of bindings share: array types, checks, and the object that Python holds.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "thermocline/codebooks.h"
#include "thermocline/compute.h"
#include "thermocline/dense.h"
#include "thermocline/formats.h"
#include "thermocline/layer.h"
#include "without_gil.h"

namespace thermocline::python {

namespace nb = nanobind;

template <typename T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using Out = nb::ndarray<float, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Bytes = In<uint8_t, 2>;

inline void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

inline Form form_of(bool prompt) { return prompt ? Form::Prompt : Form::Decode; }

inline Weight make_weight(int type_id, const uint8_t* data, int64_t rows, int64_t row_bytes) {
    FormatInfo info{};
    if (!format_info(type_id, info))
        throw std::invalid_argument("tensor type " + std::to_string(type_id) + " is not computed from");
    require(!codebook_missing(type_id), "this type needs its codebook first");
    require(row_bytes % info.block_bytes == 0, "a row is not a whole number of blocks");
    return {type_id, data, rows, row_bytes / info.block_bytes * info.block_elements, row_bytes};
}

inline Weight make_weight(int type_id, const Bytes& raw) {
    return make_weight(type_id, raw.data(), static_cast<int64_t>(raw.shape(0)), static_cast<int64_t>(raw.shape(1)));
}

// A weight as Python hands it over once: checked, and its bytes kept alive.
class Matrix {
   public:
    Matrix(int type_id, Bytes raw, float scale) : raw_(std::move(raw)), weight_(make_weight(type_id, raw_)) {
        weight_.scale = scale;
    }

    const Weight& weight() const { return weight_; }

   private:
    Bytes raw_;
    Weight weight_;
};

// The same of the matrices of all experts of a layer: uint8 [experts, rows, bytes of a row].
class MatrixStack {
   public:
    using Strided = nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu>;

    using Scales = std::optional<In<float, 1>>;

    MatrixStack(int type_id, Strided raw, Scales scales)
        : raw_(std::move(raw)),
          scales_(std::move(scales)),
          weight_(make_weight(type_id, raw_.data(), static_cast<int64_t>(raw_.shape(1)),
                              static_cast<int64_t>(raw_.shape(2)))) {
        require(raw_.stride(2) == 1 && raw_.stride(1) == weight_.row_bytes, "an expert's rows must lie row after row");
        require(!scales_ || static_cast<int64_t>(scales_->shape(0)) == size(), "one scale per expert");
    }

    int64_t size() const { return static_cast<int64_t>(raw_.shape(0)); }
    int64_t stride() const { return raw_.stride(0); }  // bytes
    const float* scales() const { return scales_ ? scales_->data() : nullptr; }
    int64_t rows() const { return weight_.rows; }
    int64_t cols() const { return weight_.cols; }
    Weight operator[](int64_t index) const {
        Weight weight = weight_;
        weight.data += index * stride();
        if (scales_) weight.scale = scales_->data()[index];
        return weight;
    }

   private:
    Strided raw_;
    Scales scales_;
    Weight weight_;  // of the first
};

// Gate and up [experts, intermediate, hidden], down [experts, hidden, intermediate], and their biases as stacks of one
// row of float32.
struct Experts {
    std::optional<MatrixStack> gate;
    MatrixStack up, down;
    std::vector<MatrixStack> biases;
    StackedExperts stacked{};

    Experts(std::optional<MatrixStack> g, MatrixStack u, MatrixStack d, int activation, std::vector<MatrixStack> b,
            std::optional<std::pair<float, float>> limits)
        : gate(std::move(g)), up(std::move(u)), down(std::move(d)), biases(std::move(b)) {
        require(activation >= 0 && activation <= 5, "no such activation of experts");
        stacked.activation = static_cast<ExpertActivation>(activation);
        require(limits.has_value() == (stacked.activation == ExpertActivation::LimitedSilu),
                "this activation has limits, or has none");
        if (limits) stacked.limits = {limits->first, limits->second};
        require(!limits || (limits->first > 0 && limits->second > 0), "limits of an activation must be positive");
        require(gate.has_value() == has_gate(stacked.activation), "this activation has a gate, or has none");
        require(up.size() == down.size() && up.cols() == down.rows() && up.rows() == down.cols(),
                "sizes of up and down differ");
        require(!gate || (gate->size() == up.size() && gate->cols() == up.cols() && gate->rows() == up.rows()),
                "sizes of gate and up differ");
        const auto weight_of = [](const MatrixStack& of) { return StackedWeight{of[0], of.stride(), of.scales()}; };
        if (up.size() == 0) return;
        if (gate) stacked.gate = weight_of(*gate);
        stacked.up = weight_of(up);
        stacked.down = weight_of(down);
        if (biases.empty()) return;
        require(biases.size() == (gate ? 3u : 2u), "a bias for each matrix, or none");
        require(!(gate && gate->scales()) && !up.scales() && !down.scales(), "matrices have scales or biases");
        if (gate) stacked.gate_bias = bias_of(biases.front(), up.rows());
        stacked.up_bias = bias_of(biases[biases.size() - 2], up.rows());
        stacked.down_bias = bias_of(biases.back(), down.rows());
    }

   private:
    StackedBias bias_of(const MatrixStack& of, int64_t rows) const {
        const Weight first = of[0];
        require(first.type_id == kF32 && of.size() == up.size() && of.rows() == 1 && of.cols() == rows,
                "a bias must be float32 [experts, 1, rows]");
        constexpr auto kBytes = static_cast<int64_t>(sizeof(float));
        require(reinterpret_cast<uintptr_t>(first.data) % sizeof(float) == 0 && of.stride() % kBytes == 0,
                "a bias must be aligned");
        return {reinterpret_cast<const float*>(first.data), of.stride() / kBytes};
    }
};

// The threads and the instruction set that jobs run on; owned by Python.
class Core {
   public:
    Core(const std::string& isa, int threads, bool pin) : set_(pick(isa)), pool_(checked(threads), pin) {}

    Compute compute() { return {pool_, *set_}; }
    Dense dense() { return {*set_->dense, pool_}; }
    std::string isa() const { return set_->name; }
    int threads() const { return pool_.threads(); }
    ThreadPool& pool() { return pool_; }
    int64_t timeline_capacity() const { return timeline_capacity_; }
    void start_timeline(int64_t capacity) {
        require(capacity >= 1 && (timeline_capacity_ == 0 || timeline_capacity_ == capacity),
                "a timeline has room for a job, and always the same");
        timeline_capacity_ = capacity;
        pool_.start_timeline(capacity);
    }
    std::vector<int64_t> busy_ns() const {
        std::vector<int64_t> each;
        for (int index = 0; index < threads(); ++index) each.push_back(pool_.busy_ns(index));
        return each;
    }

   private:
    static int checked(int threads) {
        require(threads >= 1 && threads <= 1024, "threads must be 1 to 1024");
        return threads;
    }
    static const KernelSet* pick(const std::string& isa) {
        const SetChoice* choice = find_kernel_set(isa.c_str());
        require(choice != nullptr, "no such instruction set in this build");
        require(choice->available, "this processor does not have that instruction set");
        return &choice->set;
    }

    const KernelSet* set_;
    ThreadPool pool_;
    int64_t timeline_capacity_ = 0;
};

void bind_products(nb::module_& m, nb::class_<Core>& core);
void bind_dense(nb::module_& m, nb::class_<Core>& core);
void bind_delta(nb::module_& m, nb::class_<Core>& core);
void bind_recurrent(nb::module_& m, nb::class_<Core>& core);
void bind_layer(nb::module_& m, nb::class_<Core>& core);
void bind_dispatch(nb::module_& m);
void bind_frames(nb::module_& m);
void bind_step(nb::module_& m);
void bind_handoff(nb::module_& m);
void bind_copies(nb::module_& m);
void bind_inbox(nb::module_& m);

}  // namespace thermocline::python
