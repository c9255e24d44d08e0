// A microbenchmark of waiting and reading on this machine, in about three milliseconds. The choice
// between the two ways of reducing, and how long a rank spins, follow from it
// (engine/shm/channel.py).
#pragma once

namespace potluck::shm {

// Seconds; 0 where nothing could be measured (one core only, or a machine that is too busy).
struct Costs {
    double wait_s = 0;  // until a spinning thread sees a word that another core has changed
    double turn_s = 0;  // the same when both threads share a core and yield to each other
    double wake_s = 0;  // the same when both threads sleep and must be woken
    double byte_s = 0;  // to read and add one byte that another core has written
};

Costs measure_costs();

}  // namespace potluck::shm
