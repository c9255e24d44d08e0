// What waiting and reading cost on this machine, measured in about three milliseconds.
#pragma once

namespace potluck::shm {

// Seconds; 0 where nothing could be measured (one core only, or a machine that is too busy).
struct Costs {
    double wait_s = 0;    // to see a word that a thread on another core has changed, while both spin
    double turn_s = 0;    // the same when both threads share a core and yield to each other
    double wake_s = 0;    // the same when both threads sleep and must be woken
    double byte_s = 0;    // to read and add one byte that another core has written
};

Costs measure_costs();

}  // namespace potluck::shm
