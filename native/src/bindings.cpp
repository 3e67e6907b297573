// The module, and the kernels that need no threads; checks shapes, then runs with the interpreter lock
// released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings_compute.h"
#include "thermocline/kernels.h"

namespace nb = nanobind;
namespace tc = thermocline;
using namespace thermocline::python;

namespace {

void attention(In<float, 3> q, In<float, 3> k, In<float, 3> v, In<int32_t, 1> block_table,
               int64_t block_tokens, In<int32_t, 1> positions, float scale, Out<3> out) {
    const tc::AttentionShape s{static_cast<int64_t>(q.shape(0)), static_cast<int64_t>(q.shape(1)),
                               static_cast<int64_t>(k.shape(1)), static_cast<int64_t>(q.shape(2)),
                               block_tokens};
    require(s.kv_heads > 0 && s.heads % s.kv_heads == 0, "heads must be a multiple of kv_heads");
    require(block_tokens > 0, "block_tokens must be positive");
    for (int axis = 0; axis < 3; ++axis) {
        require(k.shape(axis) == v.shape(axis), "k and v must have one shape");
        require(q.shape(axis) == out.shape(axis), "q and out must have one shape");
    }
    require(static_cast<int64_t>(k.shape(2)) == s.head_dim, "head_dim of q and k differ");
    require(positions.shape(0) == q.shape(0), "positions must have one entry per token");
    const auto blocks = static_cast<int64_t>(block_table.shape(0));
    const auto slots = static_cast<int64_t>(k.shape(0));
    for (int64_t t = 0; t < s.tokens; ++t)
        require(positions.data()[t] >= 0 && positions.data()[t] / block_tokens < blocks,
                "a position lies beyond the block table");
    for (int64_t b = 0; b < blocks; ++b)
        require(block_table.data()[b] >= 0 && block_table.data()[b] < slots / block_tokens,
                "a block lies beyond the cache");
    nb::gil_scoped_release unlocked;
    tc::attention(s, q.data(), k.data(), v.data(), block_table.data(), positions.data(), scale, out.data());
}

int64_t will_need(In<uint8_t, 1> mapping, int64_t start, int64_t end, int64_t piece_bytes) {
    require(0 <= start && start <= end && end <= static_cast<int64_t>(mapping.shape(0)),
            "the bytes lie outside of the mapping");
    nb::gil_scoped_release unlocked;
    return tc::will_need(mapping.data(), start, end, piece_bytes);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels over the bytes of a GGUF file; see kernels/cpu.py for the checked interface.";
    m.attr("__version__") = THERMOCLINE_VERSION;
    // Raised with every change of what Python sees; kernels/cpu.py names the one that it needs.
    m.attr("interface") = 4;
    auto core = nb::class_<Core>(m, "Core", "The threads and the instruction set that jobs run on.")
                    .def(nb::init<const std::string&, int, bool>(), nb::arg("isa"), nb::arg("threads"),
                         nb::arg("pin") = false)
                    .def_prop_ro("isa", &Core::isa)
                    .def_prop_ro("threads", &Core::threads);
    bind_products(m, core);
    m.def("attention", &attention, nb::arg("q").noconvert(), nb::arg("k").noconvert(), nb::arg("v").noconvert(), nb::arg("block_table").noconvert(),
          nb::arg("block_tokens"), nb::arg("positions").noconvert(), nb::arg("scale"), nb::arg("out").noconvert(),
          "Causal attention of one sequence over a cache of blocks.");
    m.def("will_need", &will_need, nb::arg("mapping").noconvert(), nb::arg("start"), nb::arg("end"),
          nb::arg("piece_bytes"),
          "Advise the pages of mapping[start:end] as needed soon; the bytes advised, or -errno.");
}
