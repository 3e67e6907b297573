// The clock of everything that is timed for the timeline.
#pragma once

#include <chrono>
#include <cstdint>

namespace thermocline {

// Nanoseconds of CLOCK_MONOTONIC.
inline int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace thermocline
