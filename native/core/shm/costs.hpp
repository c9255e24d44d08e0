// What waiting and reading cost on this machine, measured in about three milliseconds.
#pragma once

namespace potluck::shm {

// Seconds; 0 where nothing could be measured (one core only, or a machine that is too busy).
struct Costs {
    double wait_s = 0;    // to learn that a thread on another core has come, while both spin
    double turn_s = 0;    // the same when both share a core and yield to each other
    double wake_s = 0;    // the same when both sleep and must be woken
    double byte_s = 0;    // to add one byte that another core has written
};

Costs measure_costs();

}  // namespace potluck::shm
