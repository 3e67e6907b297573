// Receiving of whole short frames, and numbers of 16 bits in them; the format itself is thermocline/remote/wire.py's.
#include <cstring>

#include "bindings_compute.h"
#include "thermocline/bfloats.h"
#include "thermocline/frames.h"

namespace thermocline::python {

namespace {

constexpr int64_t kHeaderBytes = 20, kKindAt = 6, kLengthAt = 8, kRequestAt = 12;

// A Python buffer that may be written.
class Target {
   public:
    explicit Target(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) != 0) nb::raise_python_error();
    }
    ~Target() { PyBuffer_Release(&view_); }
    Target(const Target&) = delete;
    Target& operator=(const Target&) = delete;

    [[nodiscard]] uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
    [[nodiscard]] int64_t bytes() const { return view_.len; }

   private:
    Py_buffer view_{};
};

template <typename Number>
Number read_little(const uint8_t* bytes) {
    Number number = 0;
    for (size_t i = sizeof(Number); i-- > 0;) number = static_cast<Number>(number << 8 | bytes[i]);
    return number;
}

nb::object receive_frame(int fd, nb::handle buffer, const nb::bytes& prefix, int64_t spin_ns) {
    const Target target(buffer);
    int64_t count = 0;
    if (spin_ns > 0) {
        const WithoutGil unlocked;
        count = receive_soon(fd, target.data(), target.bytes(), spin_ns);
    } else {
        count = receive_soon(fd, target.data(), target.bytes(), 0);
    }
    const uint8_t* bytes = target.data();
    const bool begins_well = count >= kHeaderBytes && prefix.size() == kKindAt &&
                             std::memcmp(bytes, prefix.c_str(), kKindAt) == 0 && bytes[kKindAt + 1] == 0;
    if (!begins_well || count != kHeaderBytes + read_little<uint32_t>(bytes + kLengthAt)) return nb::int_(count);
    const nb::bytes body(bytes + kHeaderBytes, static_cast<size_t>(count - kHeaderBytes));
    return nb::make_tuple(static_cast<int>(bytes[kKindAt]), read_little<uint64_t>(bytes + kRequestAt), body);
}

using Bfloats = nb::ndarray<uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Fewer numbers take less time than giving the interpreter's lock away.
constexpr size_t kUnlockNumbers = 1 << 14;

template <typename From, typename To>
void convert(const From& given, const To& out, void (*job)(decltype(given.data()), size_t, decltype(out.data()))) {
    if (given.size() != out.size()) throw nb::value_error("the arrays have different lengths");
    if (given.size() < kUnlockNumbers) {
        job(given.data(), given.size(), out.data());
    } else {
        const WithoutGil unlocked;
        job(given.data(), given.size(), out.data());
    }
}

void pack(const In<float, 1>& values, const Bfloats& out) { convert(values, out, &pack_bfloats); }

void unpack(const In<uint16_t, 1>& packed, const Out<1>& out) { convert(packed, out, &unpack_bfloats); }

}  // namespace

void bind_frames(nb::module_& m) {
    m.def("receive_frame", &receive_frame, nb::arg("fd"), nb::arg("buffer"), nb::arg("prefix"), nb::arg("spin_ns"),
          "Receive from a socket into buffer, looking for up to spin_ns nanoseconds. One whole frame whose header "
          "begins with prefix is (kind, request, body); else the bytes that came, 0 at the stream's end, or -errno.");
    m.def("pack_bfloats", &pack, nb::arg("values"), nb::arg("out"),
          "Round numbers to bfloat16, nearest even; a NaN stays one.");
    m.def("unpack_bfloats", &unpack, nb::arg("packed"), nb::arg("out"), "Widen bfloat16 to float32.");
}

}  // namespace thermocline::python
