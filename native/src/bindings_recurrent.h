// Short convolutions, Mamba2 and the first Mamba as Python hands them over; the layer's bindings take them too.
#pragma once

#include "bindings_delta.h"
#include "thermocline/recurrent.h"

namespace thermocline::python {

// The numbers of a rule, checked against its shape once, and kept alive. job(): but for inputs, output and states.
class ShortConvRule {
   public:
    explicit ShortConvRule(In<float, 2> conv);

    ShortConvJob job() const;

   private:
    In<float, 2> conv_;
};

class MambaRule {
   public:
    using Vector = In<float, 1>;

    MambaRule(int64_t heads, int64_t head_dim, int64_t groups, int64_t state_dim, In<float, 2> conv, Vector conv_bias,
              Vector step_bias, Vector decay, Vector skip, Vector gain, float epsilon);

    MambaJob job() const;

   private:
    MambaShape shape_{};
    In<float, 2> conv_;
    Vector conv_bias_, step_bias_, decay_, skip_, gain_;
    float epsilon_;
};

class SelectiveRule {
   public:
    using Vector = In<float, 1>;

    SelectiveRule(In<float, 2> conv, Vector conv_bias, Vector step_bias, In<float, 2> decay, Vector skip);

    SelectiveJob job() const;

   private:
    SelectiveShape shape_{};
    In<float, 2> conv_;
    Vector conv_bias_, step_bias_;
    In<float, 2> decay_;
    Vector skip_;
};

}  // namespace thermocline::python
