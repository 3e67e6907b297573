// A lane's inbox: what other threads want of it. Its own thread waits here, spinning for a moment before it sleeps.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <utility>

#include "bindings_compute.h"
#include "thermocline/relax.h"
#include "without_gil.h"

namespace thermocline::python {

namespace {

using Clock = std::chrono::steady_clock;

// A thread that sleeps comes back after 20 to 50 us. Waits are mostly much shorter, or much longer: only where the
// last ones were short is it worth to look instead of to sleep.
constexpr auto kSpin = std::chrono::microseconds(200);
// How long a lane lets another one finish what it does in Python.
constexpr auto kCourtesy = std::chrono::microseconds(200);

template <typename Done>
void spin(Clock::time_point until, Done done) {
    for (int spins = 1; !done(); ++spins) {
        relax();
        if ((spins & 31) == 0 && Clock::now() >= until) return;
    }
}

// Items are put and taken with the interpreter lock held, which guards the queue.
class Inbox {
   public:
    explicit Inbox(bool is_native) : is_native_(is_native) {}

    void put(nb::object item) {
        items_.push_back(std::move(item));
        size_.store(static_cast<int>(items_.size()), std::memory_order_release);
        size_.notify_one();
    }

    [[nodiscard]] bool is_empty() const { return items_.empty(); }

    // Waits for an item. Called by one thread, the lane's.
    nb::object take() {
        while (items_.empty()) wait();
        nb::object item = std::move(items_.front());
        items_.pop_front();
        size_.store(static_cast<int>(items_.size()), std::memory_order_relaxed);
        return item;
    }

   private:
    void wait() {
        if (is_native_) lane_mark.set();
        const WithoutGil unlocked;
        const auto begin = Clock::now();
        const auto has_item = [this] { return size_.load(std::memory_order_acquire) != 0; };
        if (expected_ < kSpin) spin(begin + kSpin, has_item);
        size_.wait(0, std::memory_order_acquire);
        const auto end = Clock::now();
        expected_ += (std::min(end - begin, Clock::duration(4 * kSpin)) - expected_) / 4;
        spin(end + kCourtesy, [] { return lanes_in_python.load(std::memory_order_acquire) == 0; });
    }

    const bool is_native_;
    std::deque<nb::object> items_;
    std::atomic<int> size_{0};
    Clock::duration expected_{0};  // how long a wait lately was
};

}  // namespace

void bind_inbox(nb::module_& m) {
    nb::class_<Inbox>(m, "Inbox", "What other threads want of one thread, first in, first out.")
        .def(nb::init<bool>(), nb::arg("is_native"),
             "is_native: the thread lets go of the interpreter lock in this module alone.")
        .def("put", &Inbox::put, nb::arg("item").none(), "Add an item. From any thread; never waits.")
        .def("take", &Inbox::take, "Remove and return the first item, waiting for one. From one thread.")
        .def("is_empty", &Inbox::is_empty, "Whether no item waits.");
}

}  // namespace thermocline::python
