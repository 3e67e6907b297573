// The weights of a whole layer as Python hands them over once: checked against each other, and kept alive.
#pragma once

#include <nanobind/stl/optional.h>

#include <optional>
#include <variant>
#include <utility>
#include <vector>

#include "bindings_checks.h"
#include "bindings_delta.h"
#include "bindings_latent.h"
#include "bindings_recurrent.h"
#include "thermocline/layer.h"

namespace thermocline::python {

inline void require_bias(bool centers, const Gains& bias, int64_t hidden) {
    require(centers || !bias, "a norm with a bias takes the mean off");
    require_length(bias, hidden, "the bias of a norm must be [hidden]");
}

// A norm before the addition to the residual stream; see tc::PostNorm.
class PostNormWeights {
   public:
    PostNormWeights(Gain gain, Gains first_gain, Gains second_gain, float epsilon, float scale)
        : arrays_{gain, first_gain, second_gain} {
        const int64_t width = size(gain, 0);
        require(first_gain.has_value() == second_gain.has_value(), "the gains of two parts come together");
        require_length(first_gain, width, "a norm must be [hidden]");
        require_length(second_gain, width, "a norm must be [hidden]");
        part_ = {gain.data(), data(first_gain), data(second_gain), epsilon, scale};
        width_ = width;
    }

    const PostNorm& part() const { return part_; }
    int64_t width() const { return width_; }
    bool has_parts() const { return part_.first_gain != nullptr; }

   private:
    Gains arrays_[3];
    PostNorm part_{};
    int64_t width_ = 0;
};

// What LayerWeights consists of: checked once, and kept alive.
class AttentionWeights {
   public:
    AttentionWeights(Gain norm, const Matrix& q, std::optional<Matrix> k, std::optional<Matrix> v, const Matrix& output, Gains q_gain,
                     Gains k_gain, Gains wide_q_gain, Gains wide_k_gain, Gains q_bias, Gains k_bias, Gains v_bias,
                     float epsilon, bool norm_last, float scale, int64_t window, int activation,
                     bool gate_in_q, std::optional<Matrix> gate, Gains sinks, Gains output_bias, Gains v_gain,
                     std::optional<PostNormWeights> post, bool chunked, std::optional<Temperature> temperature, bool centers,
                     Gains norm_bias, float clip)
        : arrays_{norm, q_gain, k_gain, wide_q_gain, wide_k_gain, q_bias, k_bias, v_bias, sinks, output_bias, v_gain, norm_bias},
          matrices_{q, output},
          keys_(std::move(k)),
          values_(std::move(v)),
          gate_(std::move(gate)),
          post_(std::move(post)) {
        const auto from = gate_       ? OutputGate::From::Weight
                          : gate_in_q ? OutputGate::From::Queries
                                      : OutputGate::From::Nowhere;
        part_ = {norm.data(),       q.weight(),         keys_ ? keys_->weight() : Weight{}, values_ ? values_->weight() : Weight{},   output.weight(), data(q_gain),
                 data(k_gain),      data(wide_q_gain),  data(wide_k_gain), data(q_bias), data(k_bias),
                 data(v_bias),      epsilon,            scale,        window,
                 {from, static_cast<Activation>(activation), gate_ ? gate_->weight() : Weight{}}, data(sinks), data(output_bias), norm_last, data(v_gain),
                 post_ ? post_->part() : PostNorm{}, chunked, temperature.value_or(Temperature{0.0f, 1, 0}),
                 {centers, data(norm_bias)}, clip};
        const bool gate_in_rows = from == OutputGate::From::Queries;
        const int64_t hidden = part_.output.rows, row = part_.q.rows / (gate_in_rows ? 2 : 1), kv_row = part_.k.rows;
        require(keys_.has_value() == values_.has_value(), "keys and values come together");
        require(keys_ || (!k_gain && !v_gain && !wide_k_gain && !k_bias && !v_bias),
                "a layer that reads another's keys and values has no norms and biases of them");
        require(part_.q.cols == hidden && (!keys_ || (part_.k.cols == hidden && part_.v.cols == hidden)),
                "q, k and v must have a column per hidden number");
        require(part_.v.data != part_.k.data || part_.k.rows == part_.v.rows, "values that are the keys have their shape");
        require(!gate_in_rows || part_.q.rows == 2 * part_.output.cols, "a gate in q has a row per column of output");
        require(size(norm, 0) == hidden, "a norm must be [hidden]");
        require_bias(centers, norm_bias, hidden);
        require(clip >= 0.0f && (clip == 0.0f || part_.v.data != part_.k.data),
                "a limit of q, k and v is positive, and values are no keys then");
        require_length(wide_q_gain, row, "a wide gain must have an entry per row of q");
        require_length(wide_k_gain, kv_row, "a wide gain must have an entry per row of k");
        require(wide_q_gain.has_value() == wide_k_gain.has_value(), "wide gains come together");
        require_length(q_bias, row, "a bias must have an entry per row");
        require_length(k_bias, kv_row, "a bias must have an entry per row");
        require_length(v_bias, part_.v.rows, "a bias must have an entry per row");
        require_length(output_bias, hidden, "a bias must have an entry per row");
        require(window >= 0, "the window must not be negative");
        require(!chunked || window > 0, "chunks have a size");
        require(part_.v.data != part_.k.data || (!k_bias && !v_bias && !wide_k_gain),
                "values that are the keys have neither biases nor a norm over all heads");
        require(!post_ || (post_->width() == hidden && !post_->has_parts()),
                "the norm of attention's output is of one part, [hidden]");
        require(activation == 0 || activation == 1, "no such activation");
        require(!gate_ || (gate_->weight().cols == hidden && part_.output.cols % gate_->weight().rows == 0),
                "the gate must have a column per hidden number, and divide the columns of output");
    }

    const AttentionPart& part() const { return part_; }
    void require_heads(const CacheShape& cache) const {
        const bool gate_in_rows = part_.gate.from == OutputGate::From::Queries;
        const int64_t row = part_.q.rows / (gate_in_rows ? 2 : 1), kv_row = cache.kv_heads * cache.head_dim;
        const int64_t out_row = part_.output.cols, heads = row / cache.head_dim;
        require((!keys_ || part_.k.rows == kv_row) && row % kv_row == 0, "the heads of q, k and the cache do not match");
        require((!keys_ || part_.v.rows == cache.kv_heads * cache.value_dim()) && out_row == heads * cache.value_dim(),
                "the heads of v, output and the cache do not match");
        require(!gate_in_rows || cache.value_dim() == cache.head_dim, "a gate in q has a number per number of a value");
        for (const Gains& gain : {arrays_[1], arrays_[2]})
            require_length(gain, cache.head_dim, "a gain must have head_dim entries");
        require_length(arrays_[10], cache.value_dim(), "a gain of values must have an entry per number");
        require_length(arrays_[8], heads, "sinks must have a number per head");
        const int64_t gates = gate_ ? gate_->weight().rows : out_row;
        require(gates == out_row || gates == heads, "the gate must have a number per head or per column of output");
    }

   private:
    Gains arrays_[12];
    Matrix matrices_[2];
    std::optional<Matrix> keys_, values_;
    std::optional<Matrix> gate_;
    std::optional<PostNormWeights> post_;
    AttentionPart part_{};
};

class DeltaWeights {
   public:
    // mixed: its parts, whose rows follow each other; z_low, alpha_low: of products before z and alpha.
    DeltaWeights(Gain norm, std::vector<Matrix> mixed, const Matrix& z, const Matrix& alpha, const Matrix& beta,
                 const Matrix& output, std::optional<Matrix> z_low, std::optional<Matrix> alpha_low,
                 const DeltaRule& rule)
        : norm_(std::move(norm)),
          mixed_(std::move(mixed)),
          matrices_{z, alpha, beta, output},
          lows_{std::move(z_low), std::move(alpha_low)},
          rule_(rule) {
        require(!mixed_.empty() && mixed_.size() <= size_t{DeltaPart::kMaxMixed}, "mixed must be one to three matrices");
        part_.norm = norm_.data();
        part_.num_mixed = static_cast<int>(mixed_.size());
        part_.z = z.weight();
        part_.alpha = alpha.weight();
        part_.beta = beta.weight();
        part_.output = output.weight();
        part_.rule = rule_.job();
        const DeltaShape& shape = rule_.shape();
        const int64_t hidden = part_.output.rows, width = shape.value_heads * shape.value_dim;
        require(size(norm_, 0) == hidden, "a norm must be [hidden]");
        int64_t channels = 0;
        for (size_t m = 0; m < mixed_.size(); ++m) {
            part_.mixed[m] = mixed_[m].weight();
            require(part_.mixed[m].cols == hidden, "mixed must have a column per hidden number");
            channels += part_.mixed[m].rows;
        }
        part_.z_low = before(lows_[0], part_.z, hidden);
        part_.alpha_low = before(lows_[1], part_.alpha, hidden);
        require(part_.beta.cols == hidden, "beta must have a column per hidden number");
        require(channels == shape.channels() && part_.z.rows == width && part_.output.cols == width,
                "the sizes of the rule and of its products differ");
        require(part_.alpha.rows == shape.steps() && part_.beta.rows == shape.value_heads,
                "alpha must have a row per step, and beta one per value head");
    }

    const DeltaPart& part() const { return part_; }

   private:
    // The product before `whole`, or a weight without data.
    static Weight before(const std::optional<Matrix>& low, const Weight& whole, int64_t hidden) {
        const Weight found = low ? low->weight() : Weight{};
        require(!low || found.cols == hidden, "a product before another must have a column per hidden number");
        require(whole.cols == (low ? found.rows : hidden), "z and alpha must have a column per number that they take");
        return found;
    }

    Gain norm_;
    std::vector<Matrix> mixed_;
    Matrix matrices_[4];
    std::optional<Matrix> lows_[2];
    DeltaRule rule_;
    DeltaPart part_{};
};

// The first Mamba's products between its convolution and its scan; see tc::SelectiveProducts.
class SelectiveWeights {
   public:
    SelectiveWeights(const Matrix& low, const Matrix& keys, const Matrix& queries, const Matrix& steps, Gain low_gain,
                     Gain key_gain, Gain query_gain)
        : matrices_{low, keys, queries, steps}, gains_{low_gain, key_gain, query_gain} {
        part_ = {low.weight(), keys.weight(), queries.weight(), steps.weight(), low_gain.data(), key_gain.data(),
                 query_gain.data()};
        require(part_.steps.cols == part_.low.rows, "steps must have a column per row of low");
        require(size(low_gain, 0) == part_.low.rows && size(key_gain, 0) == part_.keys.rows &&
                    size(query_gain, 0) == part_.queries.rows,
                "a gain must have an entry per row");
    }

    const SelectiveProducts& part() const { return part_; }
    void require_shape(const SelectiveShape& shape) const {
        require(part_.low.cols == shape.width && part_.keys.cols == shape.width && part_.queries.cols == shape.width &&
                    part_.steps.rows == shape.width,
                "low, keys and queries must have a column per column of the state, and steps a row");
        require(part_.keys.rows == shape.state_dim && part_.queries.rows == shape.state_dim,
                "keys and queries must have a row per row of the state");
    }

   private:
    Matrix matrices_[4];
    Gain gains_[3];
    SelectiveProducts part_{};
};

// A mixer with one product before its rule and one behind.
class RecurrentWeights {
   public:
    RecurrentWeights(Gain norm, float epsilon, const Matrix& input, const Matrix& output,
                     std::variant<ShortConvRule, MambaRule, SelectiveRule> rule, std::optional<SelectiveWeights> products)
        : norm_(std::move(norm)), matrices_{input, output}, rule_(std::move(rule)), products_(std::move(products)) {
        part_.norm = norm_.data();
        part_.epsilon = epsilon;
        part_.input = input.weight();
        part_.output = output.weight();
        int64_t row, width;
        if (const auto* conv = std::get_if<ShortConvRule>(&rule_)) {
            part_.kind = RecurrentPart::Kind::ShortConv;
            part_.conv = conv->job();
            part_.state = part_.conv.state();
            row = 3 * part_.conv.channels;
            width = part_.conv.channels;
        } else if (const auto* mamba = std::get_if<MambaRule>(&rule_)) {
            part_.kind = RecurrentPart::Kind::Mamba;
            part_.mamba = mamba->job();
            part_.state = part_.mamba.shape.state();
            row = part_.mamba.shape.row();
            width = part_.mamba.shape.width();
        } else {
            part_.kind = RecurrentPart::Kind::Selective;
            part_.selective = std::get<SelectiveRule>(rule_).job();
            part_.state = part_.selective.shape.state();
            row = part_.selective.shape.row();
            width = part_.selective.shape.width;
        }
        require(products_.has_value() == (part_.kind == RecurrentPart::Kind::Selective),
                "the first Mamba has products between its convolution and its scan, and no other has");
        if (products_) {
            products_->require_shape(part_.selective.shape);
            part_.products = products_->part();
        }
        require(size(norm_, 0) == part_.output.rows && part_.input.cols == part_.output.rows,
                "norm and input must have a column per hidden number");
        require(part_.input.rows == row && part_.output.cols == width,
                "the sizes of the rule and of its products differ");
    }

    const RecurrentPart& part() const { return part_; }

   private:
    Gain norm_;
    Matrix matrices_[2];
    std::variant<ShortConvRule, MambaRule, SelectiveRule> rule_;
    std::optional<SelectiveWeights> products_;
    RecurrentPart part_{};
};

class RoutedExperts {
   public:
    RoutedExperts(const Matrix& router, int64_t chosen, bool normalize, float min_sum, float scale, int gating,
                  Gains logit_bias, Gains bias, int64_t groups, int64_t groups_used, int64_t group_best,
                  const Experts& experts, Gains norm, Gains experts_norm, bool weighs_input, std::optional<Matrix> down,
                  std::optional<Matrix> up)
        : router_(router), biases_{std::move(logit_bias), std::move(bias)}, experts_(experts),
          norm_(std::move(norm)), experts_norm_(std::move(experts_norm)), down_(std::move(down)), up_(std::move(up)) {
        part_ = {router.weight(), {chosen, static_cast<Gating>(gating), data(biases_[0]), data(biases_[1]), groups,
                                   groups_used, group_best, normalize, min_sum, scale},
                 data(norm_), data(experts_norm_), weighs_input};
        require(!weighs_input || chosen == 1, "a weight of the input is for one expert of each token");
        require(!weighs_input || !down_, "weights of the input do not go with products around experts");
        require_rule(part_.rule, router.weight().rows);
        for (const Gains& bias : biases_)
            require_length(bias, router.weight().rows, "a bias must have an entry per expert");
        require_length(norm_, part_.matrix.cols, "a norm must be [hidden]");
        require_length(experts_norm_, part_.matrix.cols, "a norm must be [hidden]");
        require(norm_.has_value() == experts_norm_.has_value(), "the norms of the router and of experts come together");
        const int64_t hidden = part_.matrix.cols, width = experts_.up.cols();
        require(down_.has_value() == up_.has_value(), "the products around experts come together");
        require(down_ || width == hidden, "the router must have a column per hidden number");
        if (down_) {
            around_ = {true, down_->weight(), up_->weight()};
            require(around_.down.rows == width && around_.down.cols == hidden && around_.up.rows == hidden &&
                        around_.up.cols == width,
                    "the products around experts lead from the hidden size to theirs and back");
        }
        require(part_.matrix.rows == experts_.up.size(), "the router must have a row per expert");
    }

    const RouterPart& part() const { return part_; }
    const AroundExperts& around() const { return around_; }
    const Experts& experts() const { return experts_; }

   private:
    Matrix router_;
    Gains biases_[2];
    Experts experts_;
    Gains norm_, experts_norm_;
    std::optional<Matrix> down_, up_;
    AroundExperts around_{};
    RouterPart part_{};
};

class SharedExpert {
   public:
    SharedExpert(const Experts& experts, std::optional<Matrix> gate) : experts_(experts), gate_(std::move(gate)) {
        require(experts.up.size() == 1, "a shared expert is a stack of one");
        require(!gate_ || (gate_->weight().rows == 1 && gate_->weight().cols == experts.up.cols()),
                "the gate must be [1, hidden]");
        part_ = {true, gate_.has_value(), experts_.stacked[0], gate_ ? gate_->weight() : Weight{}};
    }

    const SharedPart& part() const { return part_; }

   private:
    Experts experts_;
    std::optional<Matrix> gate_;
    SharedPart part_{};
};

class EmbeddingWeights {
   public:
    EmbeddingWeights(const Matrix& gate, const Matrix& up, const PostNormWeights& norm)
        : matrices_{gate, up}, norm_(norm), part_{true, gate.weight(), up.weight(), norm_.part()} {
        const int64_t hidden = part_.gate.cols;
        require(part_.up.rows == hidden && part_.up.cols == part_.gate.rows,
                "the products of an embedding lead from the hidden size to its width and back");
        require(norm_.width() == hidden && !norm_.has_parts(), "the norm of an embedding is of one part, [hidden]");
    }

    const EmbeddingPart& part() const { return part_; }

   private:
    Matrix matrices_[2];
    PostNormWeights norm_;
    EmbeddingPart part_;
};

// The weights of a layer, checked against each other once, and kept alive.
class LayerWeights {
   public:
    LayerWeights(std::optional<AttentionWeights> attention, std::optional<DeltaWeights> delta,
                 std::optional<RecurrentWeights> recurrent, std::optional<LatentWeights> latent, Gains norm,
                 float epsilon, std::optional<RoutedExperts> routed, std::optional<SharedExpert> shared,
                 std::optional<PostNormWeights> end, std::optional<EmbeddingWeights> embedding, int handed_on,
                 bool centers, Gains norm_bias)
        : attention_(std::move(attention)),
          delta_(std::move(delta)),
          recurrent_(std::move(recurrent)),
          latent_(std::move(latent)),
          norm_(std::move(norm)),
          norm_bias_(std::move(norm_bias)),
          routed_(std::move(routed)),
          shared_(std::move(shared)),
          end_(std::move(end)),
          embedding_(std::move(embedding)) {
        require(attention_.has_value() + delta_.has_value() + recurrent_.has_value() + latent_.has_value() <= 1,
                "a layer has one mixer");
        if (attention_) layer_.attention = attention_->part();
        if (delta_) layer_.delta = delta_->part();
        if (recurrent_) layer_.recurrent = recurrent_->part();
        layer_.is_latent = latent_.has_value();
        if (latent_) layer_.latent = latent_->part();
        layer_.hidden = attention_   ? layer_.attention.output.rows
                        : delta_     ? layer_.delta.output.rows
                        : recurrent_ ? layer_.recurrent.output.rows
                        : latent_    ? layer_.latent.output.rows
                        : norm_      ? size(*norm_, 0)
                                     : 0;
        layer_.norm = data(norm_);
        layer_.epsilon = epsilon;
        layer_.centering = {centers, data(norm_bias_)};
        require(handed_on >= 0 && handed_on <= 2, "attention hands on no such thing");
        layer_.handed_on = static_cast<HandedOn>(handed_on);
        layer_.is_routed = routed_.has_value();
        require(hidden() > 0, "a layer has a mixer, a feed-forward, or both");
        require_length(norm_, hidden(), "a norm must be [hidden]");
        require_bias(centers, norm_bias_, hidden());
        require(norm_.has_value() == (routed_ || shared_),
                "a feed-forward is a norm with routed experts, a shared one, or both");
        if (routed_) {
            layer_.router = routed_->part();
            require(layer_.router.matrix.cols == hidden(), "the router must have a column per hidden number");
            require(!end_ || !routed_->around().exist, "a layer that ends with a norm has experts of its own width");
            layer_.around = routed_->around();
            layer_.experts = routed_->experts().stacked;
        }
        if (shared_) {
            layer_.shared = shared_->part();
            require(layer_.shared.expert.up.cols == hidden(), "experts must take and give the hidden size");
        }
        if (end_) {
            layer_.end = end_->part();
            require(end_->width() == hidden(), "a norm must be [hidden]");
            require(routed_ || !end_->has_parts(), "the gains of two parts are of a layer with routed experts");
            require(routed_ || shared_, "the last norm is of experts");
        }
        if (layer_.handed_on != HandedOn::Nothing) {
            require(attention_ && norm_, "what attention hands on is for a feed-forward");
            require(layer_.attention.post.gain == nullptr && !end_ && !embedding_ &&
                        (!routed_ || (layer_.router.norm == nullptr && !layer_.around.exist)),
                    "behind attention that hands on more there is one norm, and experts of the layer's width");
            require(routed_ || layer_.handed_on != HandedOn::Input, "a layer's input is handed on to its router");
        }
        if (embedding_) {
            layer_.embedding = embedding_->part();
            require(attention_.has_value(), "a layer with embeddings of its own attends");
            require(layer_.embedding.gate.cols == hidden(), "an embedding's gate must have a column per hidden number");
        }
    }

    const Layer& layer() const { return layer_; }
    int64_t hidden() const { return layer_.hidden; }
    const AttentionWeights& attention() const {
        require(attention_.has_value(), "this layer has no attention");
        return *attention_;
    }
    StateSizes state() const {
        require(delta_ || recurrent_, "this layer has no recurrent state");
        return delta_ ? delta_->part().rule.shape.state() : recurrent_->part().state;
    }
    bool has_mixer() const { return attention_ || delta_ || recurrent_ || latent_; }
    void require_no_mixer() const { require(!has_mixer(), "this layer has a mixer"); }
    const LatentWeights& latent() const {
        require(latent_.has_value(), "this layer has no latent attention");
        return *latent_;
    }

   private:
    std::optional<AttentionWeights> attention_;
    std::optional<DeltaWeights> delta_;
    std::optional<RecurrentWeights> recurrent_;
    std::optional<LatentWeights> latent_;
    Gains norm_, norm_bias_;
    std::optional<RoutedExperts> routed_;
    std::optional<SharedExpert> shared_;
    std::optional<PostNormWeights> end_;
    std::optional<EmbeddingWeights> embedding_;
    Layer layer_{};
};

}  // namespace thermocline::python
