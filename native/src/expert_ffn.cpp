// One expert's feed-forward network for the tokens that chose it.
#include <cmath>
#include <cstring>
#include <vector>

#include "thermocline/kernels.h"

namespace thermocline {

void expert_ffn(const ExpertWeights& w, const float* x, const int32_t* rows, const float* scale,
                int64_t count, float* out) {
    const int64_t hidden = w.gate.cols, intermediate = w.gate.rows;
    std::vector<float> gathered(static_cast<size_t>(count * hidden));
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(gathered.data() + i * hidden, x + rows[i] * hidden,
                    static_cast<size_t>(hidden) * sizeof(float));
    std::vector<float> gate(static_cast<size_t>(count * intermediate));
    std::vector<float> up(static_cast<size_t>(count * intermediate));
    matmul(w.gate, gathered.data(), count, gate.data());
    matmul(w.up, gathered.data(), count, up.data());
    // The sigmoid is rounded once from double, so that the NumPy twin agrees to the bit.
    for (size_t i = 0; i < gate.size(); ++i) {
        const double g = gate[i];
        gate[i] = static_cast<float>(g / (1.0 + std::exp(-g))) * up[i];
    }
    matmul(w.down, gate.data(), count, out);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t d = 0; d < hidden; ++d) out[i * hidden + d] *= scale[i];
}

}  // namespace thermocline
