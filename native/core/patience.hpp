// A hold on deadlines: no operation of this process is overdue before a moment. The other ranks of a
// job wait so for one that sits at a breakpoint. The twin of engine/patience.py.
#pragma once

#include <atomic>

namespace potluck {

// Seconds of the monotonic clock, finite; 0: nothing is held.
inline std::atomic<double> held_until{0};

inline double held_until_s() { return held_until.load(std::memory_order_relaxed); }

}  // namespace potluck
