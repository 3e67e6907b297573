// What the files of bindings share: array types, checks, and the object that Python holds.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "thermocline/codebooks.h"
#include "thermocline/compute.h"
#include "thermocline/dense.h"
#include "thermocline/formats.h"

namespace thermocline::python {

namespace nb = nanobind;

template <typename T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using Out = nb::ndarray<float, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Bytes = In<uint8_t, 2>;

inline void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

inline Weight make_weight(int type_id, const Bytes& raw) {
    FormatInfo info{};
    if (!format_info(type_id, info))
        throw std::invalid_argument("tensor type " + std::to_string(type_id) + " is not computed from");
    require(!codebook_missing(type_id), "this type needs its codebook first");
    const auto row_bytes = static_cast<int64_t>(raw.shape(1));
    require(row_bytes % info.block_bytes == 0, "a row is not a whole number of blocks");
    return {type_id, raw.data(), static_cast<int64_t>(raw.shape(0)),
            row_bytes / info.block_bytes * info.block_elements, row_bytes};
}

// The threads and the instruction set that jobs run on; owned by Python.
class Core {
   public:
    Core(const std::string& isa, int threads, bool pin) : set_(pick(isa)), pool_(checked(threads), pin) {}

    Compute compute() { return {pool_, *set_}; }
    Dense dense() { return {*set_->dense, pool_}; }
    std::string isa() const { return set_->name; }
    int threads() const { return pool_.threads(); }

   private:
    static int checked(int threads) {
        require(threads >= 1 && threads <= 1024, "threads must be 1 to 1024");
        return threads;
    }
    static const KernelSet* pick(const std::string& isa) {
        const SetChoice* choice = find_kernel_set(isa.c_str());
        require(choice != nullptr, "no such instruction set in this build");
        require(choice->available, "this processor does not have that instruction set");
        return &choice->set;
    }

    const KernelSet* set_;
    ThreadPool pool_;
};

void bind_products(nb::module_& m, nb::class_<Core>& core);
void bind_dense(nb::class_<Core>& core);

}  // namespace thermocline::python
