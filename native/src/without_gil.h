// Runs without the interpreter lock, and says so to lanes that are about to want it.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

namespace thermocline::python {

// How many lanes run Python now. A lane that is woken waits a moment until none does: whoever finds the interpreter
// lock taken sleeps in the kernel, and to come back takes longer than most stages.
inline std::atomic<int> lanes_in_python{0};

// Whether this thread is such a lane. A thread that ends is none.
struct LaneMark {
    bool is_set = false;

    void set() {
        if (!is_set) lanes_in_python.fetch_add(1, std::memory_order_relaxed);
        is_set = true;
    }
    ~LaneMark() {
        if (is_set) lanes_in_python.fetch_sub(1, std::memory_order_relaxed);
    }
};
inline thread_local LaneMark lane_mark;

class WithoutGil {
   public:
    WithoutGil() {
        if (lane_mark.is_set) lanes_in_python.fetch_sub(1, std::memory_order_release);
    }
    ~WithoutGil() {
        if (lane_mark.is_set) lanes_in_python.fetch_add(1, std::memory_order_relaxed);
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

   private:
    nanobind::gil_scoped_release unlocked_;
};

// Takes the lock back for a while, within a WithoutGil.
class WithGil {
   public:
    WithGil() {
        if (lane_mark.is_set) lanes_in_python.fetch_add(1, std::memory_order_relaxed);
    }
    ~WithGil() {
        if (lane_mark.is_set) lanes_in_python.fetch_sub(1, std::memory_order_release);
    }
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;

   private:
    nanobind::gil_scoped_acquire locked_;
};

}  // namespace thermocline::python
