// What Python sees of the products with weights: checks shapes, then runs a kernel without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings_dense.h"
#include "thermocline/kernels.h"

namespace nb = nanobind;
namespace tc = thermocline;

namespace {

template <typename T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using Out = nb::ndarray<float, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Bytes = In<uint8_t, 2>;

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

tc::Weight make_weight(int format, const Bytes& raw) {
    tc::FormatInfo info{};
    if (!tc::format_info(format, info))
        throw std::invalid_argument("tensor type " + std::to_string(format) + " has no native decoder");
    const auto row_bytes = static_cast<int64_t>(raw.shape(1));
    require(row_bytes % info.block_bytes == 0, "a row is not a whole number of blocks");
    return {static_cast<tc::Format>(format), raw.data(), static_cast<int64_t>(raw.shape(0)),
            row_bytes / info.block_bytes * info.block_elements, row_bytes};
}

void decode_rows(int format, Bytes raw, In<int32_t, 1> rows, Out<2> out) {
    const tc::Weight w = make_weight(format, raw);
    require(out.shape(0) == rows.shape(0) && static_cast<int64_t>(out.shape(1)) == w.cols,
            "out must be [number of rows, columns]");
    for (size_t i = 0; i < rows.shape(0); ++i)
        require(rows.data()[i] >= 0 && rows.data()[i] < w.rows, "row id out of range");
    nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < rows.shape(0); ++i)
        tc::decode(w.format, w.row(rows.data()[i]), out.data() + static_cast<int64_t>(i) * w.cols, w.cols);
}

void matmul(int format, Bytes raw, In<float, 2> x, Out<2> out) {
    const tc::Weight w = make_weight(format, raw);
    require(static_cast<int64_t>(x.shape(1)) == w.cols, "x must be [tokens, columns of the weight]");
    require(out.shape(0) == x.shape(0) && static_cast<int64_t>(out.shape(1)) == w.rows,
            "out must be [tokens, rows of the weight]");
    nb::gil_scoped_release unlocked;
    tc::matmul(w, x.data(), static_cast<int64_t>(x.shape(0)), out.data());
}

void expert_ffn(std::tuple<int, int, int> formats, Bytes gate, Bytes up, Bytes down, In<float, 2> x,
                In<int32_t, 1> rows, In<float, 1> scale, Out<2> out) {
    const tc::ExpertWeights w{make_weight(std::get<0>(formats), gate),
                              make_weight(std::get<1>(formats), up),
                              make_weight(std::get<2>(formats), down)};
    const auto hidden = static_cast<int64_t>(x.shape(1));
    require(w.gate.cols == hidden && w.up.cols == hidden && w.down.rows == hidden, "hidden sizes differ");
    require(w.gate.rows == w.up.rows && w.gate.rows == w.down.cols, "intermediate sizes differ");
    require(scale.shape(0) == rows.shape(0) && out.shape(0) == rows.shape(0) &&
                static_cast<int64_t>(out.shape(1)) == hidden,
            "rows, scale and out must have one entry per routed token");
    for (size_t i = 0; i < rows.shape(0); ++i)
        require(rows.data()[i] >= 0 && rows.data()[i] < static_cast<int64_t>(x.shape(0)),
                "row id out of range");
    nb::gil_scoped_release unlocked;
    tc::expert_ffn(w, x.data(), rows.data(), scale.data(), static_cast<int64_t>(rows.shape(0)), out.data());
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
    m.attr("interface") = 3;
    m.def("decode_rows", &decode_rows, nb::arg("format"), nb::arg("raw").noconvert(), nb::arg("rows").noconvert(), nb::arg("out").noconvert(),
          "out[i] = row rows[i] of the weight `raw`, as float32.");
    m.def("matmul", &matmul, nb::arg("format"), nb::arg("raw").noconvert(), nb::arg("x").noconvert(), nb::arg("out").noconvert(),
          "out = x times the transposed weight `raw`.");
    m.def("expert_ffn", &expert_ffn, nb::arg("formats"), nb::arg("gate").noconvert(), nb::arg("up").noconvert(), nb::arg("down").noconvert(),
          nb::arg("x").noconvert(), nb::arg("rows").noconvert(), nb::arg("scale").noconvert(), nb::arg("out").noconvert(),
          "out[i] = scale[i] * down(silu(gate(x[rows[i]])) * up(x[rows[i]])).");
    m.def("will_need", &will_need, nb::arg("mapping").noconvert(), nb::arg("start"), nb::arg("end"),
          nb::arg("piece_bytes"),
          "Advise the pages of mapping[start:end] as needed soon; the bytes advised, or -errno.");
    bind_dense(m);
}
