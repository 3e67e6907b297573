// Chooses the arithmetic: by form, instruction set and the types of an element's own weights, and by nothing
// that is computed beside it.
#include <algorithm>
#include <vector>

#include "scratch.h"
#include "tile_matmul.h"

namespace thermocline {
namespace {

bool on_tiles(const Compute& compute, Form form) { return form == Form::Prompt && compute.set.tiles != nullptr; }

bool tiles_take(const ExpertGroup& group) {
    const ExpertWeights& w = group.weights;
    return tiles::takes(w.gate.type_id) && tiles::takes(w.up.type_id) && tiles::takes(w.down.type_id);
}

int64_t count_on_tiles(const ExpertWork& work) {
    return std::count_if(work.groups, work.groups + work.num_groups, tiles_take);
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
    if (!on_tiles(compute, form)) {
        expert_outputs(compute, work, out);
        return;
    }
    std::vector<ExpertGroup> groups(work.groups, work.groups + work.num_groups);
    const auto middle = std::stable_partition(groups.begin(), groups.end(), tiles_take);
    ExpertWork part = work;
    part.groups = groups.data();
    part.num_groups = middle - groups.begin();
    tiles::expert_outputs(compute, part, out);
    part.groups += part.num_groups;
    part.num_groups = groups.end() - middle;
    expert_outputs(compute, part, out);
}

void expert_sum(const Compute& compute, Form form, const ExpertWork& work, const int32_t* pair_of, int64_t slots,
                const float* residual, float* out) {
    const int64_t in_tiles = on_tiles(compute, form) ? count_on_tiles(work) : 0;
    if (in_tiles == 0) {
        expert_sum(compute, work, pair_of, slots, residual, out);
    } else if (in_tiles == work.num_groups) {
        tiles::expert_sum(compute, work, pair_of, slots, residual, out);
    } else {  // experts of different types in one layer, which files hardly have
        Scratch memory;
        auto* outputs = memory.get<float>(work.pairs * work.hidden);
        expert_outputs(compute, form, work, outputs);
        compute.pool.for_each(work.tokens, [&](int64_t t) {
            compute.set.tiles->add_slots(outputs, work.hidden, pair_of + t * slots, slots, residual + t * work.hidden,
                                         work.hidden, out + t * work.hidden);
        });
    }
}

}  // namespace thermocline
