// A layer's token-expert pairs, sorted by expert and split among those who compute them.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "bindings_compute.h"

namespace thermocline::python {

namespace {

using Numbers = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMostExperts = 65536;

// How many pairs chose each expert. Throws for an expert that is not there.
std::vector<int32_t> count_pairs(const In<int32_t, 2>& ids, int64_t num_experts) {
    require(num_experts > 0 && num_experts <= kMostExperts, "a layer has 1 to 65,536 experts");
    std::vector<int32_t> counts(static_cast<size_t>(num_experts), 0);
    for (size_t i = 0; i < ids.size(); ++i) {
        require(ids.data()[i] >= 0 && ids.data()[i] < num_experts, "there is no such expert");
        ++counts[static_cast<size_t>(ids.data()[i])];
    }
    return counts;
}

int64_t count_experts(In<int32_t, 2> ids, int64_t num_experts, Numbers out) {
    const std::vector<int32_t> counts = count_pairs(ids, num_experts);
    require(out.shape(0) >= 2 * std::min(ids.size(), counts.size()), "there is room for every chosen expert");
    int64_t chosen = 0;
    for (const int32_t count : counts) chosen += count > 0;
    int32_t *experts = out.data(), *numbers = out.data() + chosen;
    for (size_t e = 0; e < counts.size(); ++e) {
        if (counts[e] == 0) continue;
        *experts++ = static_cast<int32_t>(e);
        *numbers++ = counts[e];
    }
    return chosen;
}

// The numbers of experts and pairs of each owner.
using Sizes = nb::typed<nb::tuple, size_t, size_t, size_t, size_t, size_t, size_t>;

Sizes dispatch_pairs(In<int32_t, 2> ids, In<float, 2> weights, In<uint8_t, 1> owners, Numbers out) {
    constexpr size_t kOwners = 3;
    const size_t pairs = ids.size(), num_experts = owners.shape(0), slots = ids.shape(1);
    require(weights.shape(0) == ids.shape(0) && weights.shape(1) == slots, "every pair has a weight");
    std::vector<int32_t> counts = count_pairs(ids, static_cast<int64_t>(num_experts));
    require(out.shape(0) >= 2 * std::min(pairs, num_experts) + 3 * pairs, "there is room for every pair");
    std::array<size_t, kOwners> owned_experts{}, owned_pairs{};
    for (size_t e = 0; e < num_experts; ++e) {
        require(owners.data()[e] < kOwners, "there is no such owner");
        owned_experts[owners.data()[e]] += counts[e] > 0;
        owned_pairs[owners.data()[e]] += static_cast<size_t>(counts[e]);
    }
    // One after the other for each owner: experts, counts, rows, slots, weights.
    std::array<int32_t*, kOwners> experts{}, numbers{}, first{};
    int32_t* free = out.data();
    for (size_t o = 0; o < kOwners; ++o) {
        experts[o] = free;
        numbers[o] = free + owned_experts[o];
        first[o] = free + 2 * owned_experts[o];
        free = first[o] + 3 * owned_pairs[o];
    }
    std::array<int32_t, kOwners> before{};
    for (size_t e = 0; e < num_experts; ++e) {
        const size_t o = owners.data()[e];
        const int32_t count = counts[e];
        counts[e] = before[o];  // where the expert's next pair goes
        before[o] += count;
        if (count == 0) continue;
        *experts[o]++ = static_cast<int32_t>(e);
        *numbers[o]++ = count;
    }
    size_t pair = 0;
    for (size_t row = 0; row < ids.shape(0); ++row) {
        for (size_t slot = 0; slot < slots; ++slot, ++pair) {
            const auto e = static_cast<size_t>(ids.data()[pair]);
            const size_t o = owners.data()[e], mine = owned_pairs[o];
            int32_t* at = first[o] + counts[e]++;
            at[0] = static_cast<int32_t>(row);
            at[mine] = static_cast<int32_t>(slot);
            std::memcpy(at + 2 * mine, weights.data() + pair, sizeof(float));
        }
    }
    return Sizes(nb::make_tuple(owned_experts[0], owned_pairs[0], owned_experts[1], owned_pairs[1], owned_experts[2],
                          owned_pairs[2]));
}

// What tokens chose in some layers, and which of it was resident.
using Counts = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using LayerCounts = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::typed<nb::tuple, int64_t, int64_t> count_choices(In<int32_t, 3> ids, In<int32_t, 1> layers, In<int32_t, 2> residency,
                                                     Counts counts, LayerCounts tokens) {
    const size_t experts = counts.shape(1), pairs = ids.shape(1) * ids.shape(2);
    require(ids.shape(0) == layers.shape(0), "every layer has choices");
    require(residency.shape(0) == counts.shape(0) && residency.shape(1) == experts, "counts has the shape of residency");
    require(tokens.shape(0) == counts.shape(0), "every layer has its tokens");
    int64_t hits = 0, hot_layers = 0;
    for (size_t n = 0; n < layers.shape(0); ++n) {
        const int64_t layer = layers.data()[n];
        require(layer >= 0 && layer < static_cast<int64_t>(counts.shape(0)), "there is no such layer");
        const size_t row = static_cast<size_t>(layer) * experts;
        size_t found = 0;
        for (size_t pair = 0; pair < pairs; ++pair) {
            const int32_t expert = ids.data()[n * pairs + pair];
            require(expert >= 0 && expert < static_cast<int64_t>(experts), "there is no such expert");
            ++counts.data()[row + static_cast<size_t>(expert)];
            found += residency.data()[row + static_cast<size_t>(expert)] >= 0;
        }
        tokens.data()[layer] += static_cast<int64_t>(ids.shape(1));
        hits += static_cast<int64_t>(found);
        hot_layers += found == pairs;
    }
    return nb::typed<nb::tuple, int64_t, int64_t>(nb::make_tuple(hits, hot_layers));
}

}  // namespace

void bind_dispatch(nb::module_& m) {
    m.def("count_experts", &count_experts, nb::arg("expert_ids"), nb::arg("num_experts"),
          nb::arg("out").noconvert(),
          "Write the experts that some tokens chose, ascending, then how many tokens chose each; their number.");
    m.def("dispatch_pairs", &dispatch_pairs, nb::arg("expert_ids"), nb::arg("weights"),
          nb::arg("owners").noconvert(), nb::arg("out").noconvert(),
          "Write for each of three owners its experts, ascending, their counts, and the rows, slots and weights of its "
          "pairs by expert, then by token; the numbers of experts and pairs of each. owners: one for each expert.");
    m.def("count_choices", &count_choices, nb::arg("ids").noconvert(), nb::arg("layers").noconvert(),
          nb::arg("residency").noconvert(), nb::arg("counts").noconvert(), nb::arg("num_tokens").noconvert(),
          "Add the choices [n, tokens, slots] of n layers to counts [layers, experts], and the tokens to num_tokens [layers]; how many of them had a slot in\n"
          "residency [layers, experts], and in how many layers all had.");
}

}  // namespace thermocline::python
