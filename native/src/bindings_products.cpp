// Matrix products and experts for Python: checks shapes, then runs with the interpreter lock released.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings_compute.h"
#include "missing_pages.h"
#include "thermocline/codebooks.h"
#include "thermocline/matmul.h"
#include "thermocline/roofline.h"

namespace thermocline::python {
namespace {

void decode_rows(Core& core, const Matrix& matrix, const In<int32_t, 1>& rows, const Out<2>& out, bool may_be_missing) {
    const Weight& w = matrix.weight();
    const auto count = static_cast<int64_t>(rows.shape(0));
    require(out.shape(0) == rows.shape(0) && static_cast<int64_t>(out.shape(1)) == w.cols,
            "out must be [number of rows, columns]");
    for (int64_t i = 0; i < count; ++i)
        require(rows.data()[i] >= 0 && rows.data()[i] < w.rows, "row id out of range");
    const WithoutGil unlocked;
    const Compute compute = core.compute();
    // They lie anywhere in a large table, and a disk answers many questions at once.
    if (may_be_missing) compute.pool.for_each(count, [&](int64_t i) { ask_for(w.row(rows.data()[i]), w.row_bytes); });
    compute.pool.for_each(count, [&](int64_t i) {
        compute.set.gemm->decode_row(w.type_id, w.row(rows.data()[i]), w.cols, out.data() + i * w.cols);
    });
}

void multiply_all(Core& core, const std::vector<const Matrix*>& weights, const In<float, 2>& x,
                  const std::vector<Out<2>>& outs, const std::optional<In<float, 2>>& add, bool prompt) {
    require(weights.size() == outs.size(), "one output per weight");
    require(!add || weights.size() == 1, "only a single product is added to");
    std::vector<Product> products;
    for (size_t i = 0; i < weights.size(); ++i) {
        require(weights[i] != nullptr, "a weight is missing");
        const Weight& w = weights[i]->weight();
        require(static_cast<int64_t>(x.shape(1)) == w.cols, "x must be [tokens, columns of the weight]");
        require(outs[i].shape(0) == x.shape(0) && static_cast<int64_t>(outs[i].shape(1)) == w.rows,
                "out must be [tokens, rows of the weight]");
        products.push_back({w, outs[i].data(), w.rows, nullptr});
    }
    if (add) {
        require(add->shape(0) == outs[0].shape(0) && add->shape(1) == outs[0].shape(1),
                "add must have the shape of out");
        products[0].add = add->data();
    }
    const WithoutGil unlocked;
    thermocline::multiply_all(core.compute(), form_of(prompt), x.data(), static_cast<int64_t>(x.shape(0)),
                              products.data(), static_cast<int>(products.size()));
}

// Checked shapes of one call; keeps the groups alive for its length.
struct CheckedWork {
    std::vector<ExpertGroup> groups;
    ExpertWork work{};
    bool may_be_missing;

    CheckedWork(const Experts& of, const In<int32_t, 1>& experts, const In<int32_t, 1>& counts, const In<float, 2>& x,
                const In<int32_t, 1>& rows, const In<float, 1>& scale, bool may_be_missing)
        : may_be_missing(may_be_missing) {
        const auto hidden = static_cast<int64_t>(x.shape(1)), tokens = static_cast<int64_t>(x.shape(0));
        const auto pairs = static_cast<int64_t>(rows.shape(0));
        require(of.up.cols() == hidden, "hidden sizes differ");
        require(experts.shape(0) == counts.shape(0), "one count per expert");
        int64_t first = 0;
        for (size_t i = 0; i < experts.shape(0); ++i) {
            const int64_t expert = experts.data()[i], count = counts.data()[i];
            require(expert >= 0 && expert < of.up.size(), "expert id out of range");
            require(count >= 0 && count <= pairs - first, "more pairs than rows");
            if (count > 0) groups.push_back({of.stacked[expert], first, count});
            first += count;
        }
        require(first == pairs, "fewer pairs than rows");
        require(scale.shape(0) == rows.shape(0), "scale must have one entry per pair");
        for (int64_t i = 0; i < pairs; ++i)
            require(rows.data()[i] >= 0 && rows.data()[i] < tokens, "row id out of range");
        work = {groups.data(), static_cast<int64_t>(groups.size()), x.data(), tokens, hidden, rows.data(),
                scale.data(), pairs};
    }

    // Without the GIL.
    const ExpertWork& in_order() {
        if (may_be_missing) put_present_first(groups);
        return work;
    }
};

void expert_outputs(Core& core, const Experts& of, const In<int32_t, 1>& experts, const In<int32_t, 1>& counts,
                    const In<float, 2>& x, const In<int32_t, 1>& rows, const In<float, 1>& scale, const Out<2>& out,
                    bool prompt, bool may_be_missing) {
    CheckedWork checked(of, experts, counts, x, rows, scale, may_be_missing);
    require(out.shape(0) == rows.shape(0) && out.shape(1) == x.shape(1), "out must be [pairs, hidden]");
    const WithoutGil unlocked;
    thermocline::expert_outputs(core.compute(), form_of(prompt), checked.in_order(), out.data());
}

void expert_sum(Core& core, const Experts& of, const In<int32_t, 1>& experts, const In<int32_t, 1>& counts,
                const In<float, 2>& x, const In<int32_t, 1>& rows, const In<float, 1>& scale,
                const In<int32_t, 2>& pair_of, const In<float, 2>& residual, const Out<2>& out, bool prompt,
                bool may_be_missing) {
    CheckedWork checked(of, experts, counts, x, rows, scale, may_be_missing);
    for (int axis = 0; axis < 2; ++axis)
        require(out.shape(axis) == x.shape(axis) && residual.shape(axis) == x.shape(axis),
                "x, residual and out must have one shape");
    require(pair_of.shape(0) == x.shape(0) && pair_of.shape(1) >= 1, "pair_of must be [tokens, slots]");
    const auto slots = static_cast<int64_t>(pair_of.shape(1));
    for (int64_t i = 0; i < checked.work.tokens * slots; ++i)
        require(pair_of.data()[i] >= 0 && pair_of.data()[i] < checked.work.pairs, "pair out of range");
    const WithoutGil unlocked;
    thermocline::expert_sum(core.compute(), form_of(prompt), checked.in_order(), pair_of.data(), slots, residual.data(),
                            out.data());
}

UnpackInfo quantised_block(int type_id) {
    UnpackInfo info{};
    if (!unpack_info(type_id, info))
        throw std::invalid_argument("tensor type " + std::to_string(type_id) + " is no quantised block");
    return info;
}

std::tuple<int, int, bool, bool, int64_t, int64_t> type_facts(int type_id) {
    const UnpackInfo info = quantised_block(type_id);
    return {info.offset, info.group, info.has_minimum, info.largest <= 127, info.block_elements, info.block_bytes};
}

void set_codebook(int type_id, const Bytes& table) {
    require(thermocline::set_codebook(type_id, table.data(), static_cast<int64_t>(table.size())),
            "not a codebook of this type, or not the one that it has");
}

using OutBytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void unpack(Core& core, int type_id, const Bytes& raw, const OutBytes& q, const Out<2>& scale,
            const Out<2>& minimum) {
    const Weight w = python::make_weight(type_id, raw);
    const UnpackInfo info = quantised_block(type_id);
    require(static_cast<int64_t>(q.shape(0)) == w.rows && static_cast<int64_t>(q.shape(1)) == w.cols,
            "q must be [rows, columns]");
    for (const auto* out : {&scale, &minimum})
        require(static_cast<int64_t>(out->shape(0)) == w.rows &&
                    static_cast<int64_t>(out->shape(1)) == w.cols / kGroupMin,
                "scale and minimum must be [rows, columns / 16]");
    const WithoutGil unlocked;
    const UnpackFn unpack_row = core.compute().set.gemm->find_unpack(type_id);
    for (int64_t r = 0; r < w.rows; ++r)
        for (int64_t c = 0; c < w.cols; c += kSpan)
            unpack_row(w.row(r) + c / info.block_elements * info.block_bytes, std::min<int64_t>(kSpan, w.cols - c),
                       q.data() + r * w.cols + c, scale.data() + (r * w.cols + c) / kGroupMin,
                       minimum.data() + (r * w.cols + c) / kGroupMin);
}

uint64_t read_all(Core& core, const In<uint8_t, 1>& bytes) {
    const WithoutGil unlocked;
    return thermocline::read_all(core.compute(), bytes.data(), static_cast<int64_t>(bytes.shape(0)));
}

int64_t multiply_in_cache(Core& core, int64_t rounds) {
    require(rounds >= 1, "rounds must be positive");
    const WithoutGil unlocked;
    return thermocline::multiply_in_cache(core.compute(), rounds);
}

std::vector<std::tuple<std::string, bool>> instruction_sets() {
    size_t count = 0;
    const SetChoice* sets = kernel_sets(count);
    std::vector<std::tuple<std::string, bool>> found;
    for (size_t i = 0; i < count; ++i)
        if (!sets[i].emulated) found.emplace_back(sets[i].set.name, sets[i].available);
    return found;
}

std::vector<std::string> emulated_sets() {
    size_t count = 0;
    const SetChoice* sets = kernel_sets(count);
    std::vector<std::string> found;
    for (size_t i = 0; i < count; ++i)
        if (sets[i].emulated && sets[i].available) found.emplace_back(sets[i].set.name);
    return found;
}

}  // namespace

void bind_products(nb::module_& m, nb::class_<Core>& core) {
    nb::class_<Matrix>(m, "Matrix",
          "A weight [rows, cols] where it lies: uint8 [rows, bytes of a row], which it keeps alive. Its products are "
          "multiplied by `scale`.")
        .def(nb::init<int, Bytes, float>(), nb::arg("type_id"), nb::arg("raw").noconvert(), nb::arg("scale") = 1.0f);
    nb::class_<MatrixStack>(m, "MatrixStack",
          "One matrix per expert: uint8 [experts, rows, bytes of a row]. scales: float32 [experts], of their products.")
        .def(nb::init<int, MatrixStack::Strided, MatrixStack::Scales>(), nb::arg("type_id"),
             nb::arg("raw").noconvert(), nb::arg("scales").noconvert().none() = nb::none())
        .def_prop_ro("rows", &MatrixStack::rows);
    nb::class_<Experts>(m, "Experts",
          "The experts of a layer: gate and up [experts, intermediate, hidden], down [experts, hidden, "
          "intermediate]. activation: the number of an ExpertActivation; biases: of gate, up and down, or of up and "
          "down, float32 [experts, 1, rows], or none. limits: of the activation, where it has them.")
        .def(nb::init<std::optional<MatrixStack>, MatrixStack, MatrixStack, int, std::vector<MatrixStack>,
                      std::optional<std::pair<float, float>>>(),
             nb::arg("gate").none(), nb::arg("up"), nb::arg("down"), nb::arg("activation"), nb::arg("biases"),
             nb::arg("limits").none() = nb::none());
    m.def("instruction_sets", &instruction_sets,
          "Name of each set of the build, narrowest first, and whether this machine has it.");
    m.def("emulated_sets", &emulated_sets,
          "Sets that this machine can run only in the manner of a test: exact and slow.");
    m.def("set_codebook", &set_codebook, nb::arg("type_id"), nb::arg("table").noconvert(),
          "Give a type its codebook, once per process.");
    m.def("unpack_info", &type_facts, nb::arg("type_id"),
          "(offset, group, has_minimum, seven_bits, block_elements, block_bytes) of a quantised type.");
    core.def("unpack", &unpack, nb::arg("type_id"), nb::arg("raw").noconvert(), nb::arg("q").noconvert(),
             nb::arg("scale").noconvert(), nb::arg("minimum").noconvert(),
             "raw as scale * (q - offset) - minimum; minimum is left alone where the type has none.");
    core.def("read_all", &read_all, nb::arg("bytes").noconvert(),
             "Read every byte once, with all threads; a checksum.");
    core.def("multiply_in_cache", &multiply_in_cache, nb::arg("rounds"),
             "Multiply-adds done on every thread without touching memory; time it for the limit.");
    core.def("decode_rows", &decode_rows, nb::arg("weight"), nb::arg("rows").noconvert(), nb::arg("out").noconvert(),
             nb::arg("may_be_missing") = false, "out[i] = row rows[i] of the weight, as float32.");
    core.def("multiply_all", &multiply_all, nb::arg("weights"), nb::arg("x").noconvert(),
             nb::arg("outs").noconvert(), nb::arg("add").noconvert().none() = nb::none(), nb::arg("prompt") = false,
             "outs[i] = x times the transposed weights[i], plus `add`.");
    core.def("expert_outputs", &expert_outputs, nb::arg("of"), nb::arg("experts").noconvert(),
             nb::arg("counts").noconvert(), nb::arg("x").noconvert(), nb::arg("rows").noconvert(),
             nb::arg("scale").noconvert(), nb::arg("out").noconvert(), nb::arg("prompt") = false,
             nb::arg("may_be_missing") = false,
             "out[pair] = scale * down(activation(gate(x[row]), up(x[row]))); counts[i] pairs chose experts[i].");
    core.def("expert_sum", &expert_sum, nb::arg("of"), nb::arg("experts").noconvert(), nb::arg("counts").noconvert(),
             nb::arg("x").noconvert(), nb::arg("rows").noconvert(), nb::arg("scale").noconvert(),
             nb::arg("pair_of").noconvert(), nb::arg("residual").noconvert(), nb::arg("out").noconvert(),
             nb::arg("prompt") = false, nb::arg("may_be_missing") = false,
             "The pairs' outputs added up per token in slot order, plus the residual.");
}

}  // namespace thermocline::python
