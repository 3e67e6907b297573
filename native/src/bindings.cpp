// The module, and the kernels that need no threads; checks shapes, then runs with the interpreter lock
// released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "bindings_compute.h"
#include "scratch.h"
#include "thermocline/mapping_guard.h"
#include "thermocline/page_advice.h"

namespace nb = nanobind;
namespace tc = thermocline;
using namespace thermocline::python;

namespace {

using PageCall = int64_t (*)(const uint8_t*, int64_t, int64_t);

template <PageCall call>
int64_t on_pages(In<uint8_t, 1> mapping, int64_t start, int64_t end) {
    require(0 <= start && start <= end && end <= static_cast<int64_t>(mapping.shape(0)),
            "the bytes lie outside of the mapping");
    const WithoutGil unlocked;
    return call(mapping.data(), start, end);
}

template <int64_t (*Count)(const uint8_t*, const int64_t*, int64_t)>
int64_t count_pages(In<uint8_t, 1> mapping, In<int64_t, 1> offsets) {
    const auto count = static_cast<int64_t>(offsets.shape(0)), bytes = static_cast<int64_t>(mapping.shape(0));
    for (int64_t i = 0; i < count; ++i)
        require(offsets.data()[i] >= 0 && offsets.data()[i] < bytes, "a byte lies outside of the mapping");
    const WithoutGil unlocked;
    return Count(mapping.data(), offsets.data(), count);
}

void make_guarded_map(tc::GuardedMap* self, const In<uint8_t, 1>& mapping, int fd) {
    try {
        new (self) tc::GuardedMap(mapping.data(), static_cast<int64_t>(mapping.shape(0)), fd);
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

int change_of(tc::GuardedMap& map) {
    const WithoutGil unlocked;  // a network's file system may have to ask
    return static_cast<int>(map.change());
}

void release_map(tc::GuardedMap& map) {
    const WithoutGil unlocked;
    map.release();
}

}  // namespace

NB_MODULE(_native, m) {
    // A process may end with an engine open, a daemon thread holding its kernels: no fault to report to users.
    nb::set_leak_warnings(false);
    m.doc() = "CPU kernels over the bytes of a GGUF file; see kernels/cpu.py for the checked interface.";
    m.attr("__version__") = THERMOCLINE_VERSION;
    // Raised with every change of what Python sees; kernels/native.py names the one that it needs.
    m.attr("interface") = 36;
    auto core = nb::class_<Core>(m, "Core", "The threads and the instruction set that jobs run on.")
                    .def(nb::init<const std::string&, int, bool>(), nb::arg("isa"), nb::arg("threads"),
                         nb::arg("pin") = false)
                    .def_prop_ro("isa", &Core::isa)
                    .def_prop_ro("threads", &Core::threads);
    bind_products(m, core);
    bind_dense(m, core);
    bind_delta(m, core);
    bind_recurrent(m, core);
    bind_layer(m, core);
    bind_dispatch(m);
    bind_frames(m);
    bind_step(m);
    bind_handoff(m);
    bind_copies(m);
    bind_inbox(m);
    nb::class_<tc::GuardedMap>(m, "GuardedMap", "A mapped file whose bytes become zeros where they can not be read.")
        .def("__init__", &make_guarded_map, nb::arg("mapping").noconvert(), nb::arg("fd"))
        .def("change", &change_of,
             "What happened to the file: 0 nothing, 1 bytes could not be read, 2 another size, 3 another mtime.")
        .def("release", &release_map, "Guard no longer: the mapping goes.");
    m.def("give_back_scratch", &tc::Scratch::give_back,
          "Give back what this thread keeps for jobs on the way; the next one takes what it needs.");
    m.def("resident_pages", &count_pages<tc::resident_pages>, nb::arg("mapping").noconvert(),
          nb::arg("offsets").noconvert(), "How many of the pages that hold these bytes are in memory, or -errno.");
    m.def("pages_read_at_once", &count_pages<tc::pages_read_at_once>, nb::arg("mapping").noconvert(),
          nb::arg("offsets").noconvert(),
          "The same for a file of any owner, or -errno; reads the pages that are not, and waits for them.");
    m.def("fetch_pages", &on_pages<tc::fetch_pages>, nb::arg("mapping").noconvert(), nb::arg("start"),
          nb::arg("end"),
          "Read the pages of mapping[start:end] into memory and wait for them; their bytes, or -errno.");
    m.def("fetch_huge_pages", &on_pages<tc::fetch_huge_pages>, nb::arg("mapping").noconvert(), nb::arg("start"),
          nb::arg("end"),
          "The same in huge pages of 2 MiB, neighbours too, where `allow_huge_pages` did; their bytes, or -errno.");
    m.def("allow_huge_pages", &on_pages<tc::allow_huge_pages>, nb::arg("mapping").noconvert(), nb::arg("start"), nb::arg("end"),
          "Let missing pages of mapping[start:end] come in huge pages of 2 MiB; their bytes, or -errno.");
    m.def("release_pages", &on_pages<tc::release_pages>, nb::arg("mapping").noconvert(), nb::arg("start"),
          nb::arg("end"), "Let go of the pages inside mapping[start:end]; their bytes, or -errno.");
    m.def("unmap_pages", &on_pages<tc::unmap_pages>, nb::arg("mapping").noconvert(), nb::arg("start"),
          nb::arg("end"), "Use the pages inside mapping[start:end] no longer, so that they can be let go; their bytes, or -errno.");
    m.def("stop_read_ahead", &on_pages<tc::stop_read_ahead>, nb::arg("mapping").noconvert(), nb::arg("start"),
          nb::arg("end"),
          "Let a missing page of mapping[start:end] come without its neighbours; their bytes, or -errno.");
}
