// The weights of latent attention as Python hands them over, and the checks of its cache.
#pragma once

#include <optional>
#include <utility>

#include "bindings_checks.h"
#include "thermocline/latent.h"

namespace thermocline::python {

using Gain = In<float, 1>;
using Gains = std::optional<Gain>;

inline const float* data(const Gains& array) { return array ? array->data() : nullptr; }

inline void require_length(const Gains& array, int64_t length, const char* what) {
    require(!array || size(*array, 0) == length, what);
}

// A cache whose values are the first `latent` numbers of its keys.
template <typename Array>
CacheShape latent_shape(int type, int64_t block_tokens, int64_t head_dim, int64_t latent, const Array& keys) {
    CacheShape cache = cache_shape(type, block_tokens, head_dim, keys, keys);
    require(cache.kv_heads == 1, "a latent cache has one head");
    require(latent > 0 && latent <= head_dim, "a latent row begins with its value");
    cache.latent = latent;
    return cache;
}

// How many first tokens of each sequence take the expanded form.
inline void require_expanded(const In<int32_t, 1>& expanded, const In<int32_t, 1>& starts) {
    require(size(expanded, 0) + 1 == size(starts, 0), "expanded must have one entry per sequence");
    for (int64_t s = 0; s < size(expanded, 0); ++s)
        require(expanded.data()[s] >= 0 && expanded.data()[s] <= starts.data()[s + 1] - starts.data()[s],
                "more tokens are expanded than a sequence has");
}

// What LayerWeights consists of where a layer has latent attention: checked once, and kept alive.
class LatentWeights {
   public:
    LatentWeights(Gain norm, std::optional<Matrix> low, Gains low_gain, const Matrix& q, const Matrix& kv, Gain kv_gain,
                  const MatrixStack& k_up, const MatrixStack& v_up, const Matrix& output, float epsilon, float scale,
                  std::optional<Temperature> temperature, std::optional<Matrix> gate)
        : gains_{norm, low_gain, kv_gain},
          matrices_{q, kv, output},
          low_(std::move(low)),
          gate_(std::move(gate)),
          stacks_{k_up, v_up} {
        const Weight& to_q = matrices_[0].weight();
        part_ = {norm.data(),
                 low_.has_value(),
                 low_ ? low_->weight() : Weight{},
                 data(low_gain),
                 to_q,
                 matrices_[1].weight(),
                 kv_gain.data(),
                 {stacks_[0][0], stacks_[0].stride(), stacks_[0].scales()},
                 {stacks_[1][0], stacks_[1].stride(), stacks_[1].scales()},
                 stacks_[0].size(),
                 matrices_[2].weight(),
                 epsilon,
                 scale,
                 temperature.value_or(Temperature{0.0f, 1, 0}),
                 gate_ ? gate_->weight() : Weight{}};
        const int64_t hidden = part_.output.rows, heads = part_.heads;
        require(size(norm, 0) == hidden && part_.kv.cols == hidden, "norm and kv must have the hidden size");
        require(low_.has_value() == low_gain.has_value(), "a matrix before q comes with a norm");
        require(!low_ || part_.low.cols == hidden, "the matrix before q must have a column per hidden number");
        require_length(low_gain, part_.low.rows, "the norm before q must have its number of columns");
        require(to_q.cols == (low_ ? part_.low.rows : hidden), "q must have a column per number that it takes");
        require(heads > 0 && stacks_[1].size() == heads && to_q.rows % heads == 0, "numbers of heads differ");
        require(part_.k_up.first.rows == part_.latent() && size(kv_gain, 0) == part_.latent(),
                "the norm of kv and the matrices of keys and values must have one latent size");
        require(part_.latent() < part_.kv.rows && part_.kv.rows <= kMaxHeadDim, "kv must have rows behind the latent ones");
        require(part_.q_width() - part_.plain() == part_.kv.rows - part_.latent(),
                "q and kv must have the same number of turned rows");
        require(!gate_ || (part_.gate.rows == heads && part_.gate.cols == hidden), "the gate must be [heads, hidden]");
        require(part_.output.cols == heads * part_.v_up.first.rows, "output must have a column per head and value");
    }

    const LatentPart& part() const { return part_; }

   private:
    Gains gains_[3];
    Matrix matrices_[3];
    std::optional<Matrix> low_, gate_;
    MatrixStack stacks_[2];
    LatentPart part_{};
};

void bind_latent(nb::module_& m, nb::class_<Core>& core);

}  // namespace thermocline::python
