// Many copies to a device, queued by one call: between two calls that each take a microsecond, Python would take the
// interpreter lock from whoever computes, and wait for it.
#include "bindings_checks.h"
#include "without_gil.h"

namespace thermocline::python {
namespace {

// As CUDA's driver has it: cuMemcpyHtoDAsync(where on the device, from where, bytes, stream), 0 for success.
using CopyToDevice = int (*)(uint64_t, const void*, size_t, void*);

// Only addresses are known here, so that the caller vouches for the memory behind them.
int queue_copies(uintptr_t function, In<int64_t, 2> copies, uintptr_t stream) {
    require(function != 0, "there is no function that copies");
    require(size(copies, 1) == 3, "a copy has two addresses and a number of bytes");
    const int64_t count = size(copies, 0), *each = copies.data();
    for (int64_t i = 0; i < count; ++i)
        require(each[3 * i] > 0 && each[3 * i + 1] > 0 && each[3 * i + 2] > 0, "a copy's addresses and bytes are positive");
    const auto copy = reinterpret_cast<CopyToDevice>(function);
    const WithoutGil unlocked;
    for (int64_t i = 0; i < count; ++i, each += 3) {
        const int error = copy(static_cast<uint64_t>(each[0]), reinterpret_cast<const void*>(each[1]),
                               static_cast<size_t>(each[2]), reinterpret_cast<void*>(stream));
        if (error != 0) return error;
    }
    return 0;
}

}  // namespace

void bind_copies(nb::module_& m) {
    m.def("queue_copies", &queue_copies, nb::arg("function"), nb::arg("copies").noconvert(), nb::arg("stream"),
          "Call a driver's function for each copy to a device, int64 [n, 3]: addresses there and here, and bytes. "
          "Its first error, or 0.");
}

}  // namespace thermocline::python
