// Chooses the arithmetic: by form, instruction set and the types of an element's own weights, and by nothing
// that is computed beside it.
#include <vector>

#include "tile_matmul.h"

namespace thermocline {
namespace {

// The experts of a layer share their types.
bool on_tiles(const Compute& compute, Form form, const ExpertWork& work) {
    if (!on_tiles(compute, form) || work.num_groups == 0) return false;
    const ExpertWeights& w = work.groups[0].weights;
    return (!has_gate(w.activation) || tiles::takes(w.gate.type_id)) && tiles::takes(w.up.type_id) && tiles::takes(w.down.type_id);
}

}  // namespace

void multiply_all(const Compute& compute, Form form, const float* x, int64_t tokens, const Product* products,
                  int count) {
    if (!on_tiles(compute, form)) {
        multiply_all(compute, x, tokens, products, count);
        return;
    }
    std::vector<Product> in_tiles, others;
    for (int p = 0; p < count; ++p)
        (tiles::takes(products[p].weight.type_id) ? in_tiles : others).push_back(products[p]);
    tiles::multiply_all(compute, x, tokens, in_tiles.data(), static_cast<int>(in_tiles.size()));
    multiply_all(compute, x, tokens, others.data(), static_cast<int>(others.size()));
}

void expert_outputs(const Compute& compute, Form form, const ExpertWork& work, float* out) {
    if (on_tiles(compute, form, work))
        tiles::expert_outputs(compute, work, out);
    else
        expert_outputs(compute, work, out);
}

void expert_sum(const Compute& compute, Form form, const ExpertWork& work, const int32_t* pair_of, int64_t slots,
                const float* residual, float* out) {
    if (on_tiles(compute, form, work))
        tiles::expert_sum(compute, work, pair_of, slots, residual, out);
    else
        expert_sum(compute, work, pair_of, slots, residual, out);
}

}  // namespace thermocline
