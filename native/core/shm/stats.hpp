// Statistics of the calls through shared memory: histograms of their times and sizes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "core/shm/running_call.hpp"

namespace potluck::shm {

// A counter with one writer at a time, the thread that drives the channel, and any number of
// readers. So it needs no atomic read-modify-write, which would cost some 20 cycles in each call.
class Counter {
public:
    void add(std::uint64_t amount) {
        value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
    }
    std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> value_{0};
};

// The bounds are those of potluck._core.metrics: seconds from 10 us, each bound twice the one before;
// bytes from 64, each bound four times the one before; the last bucket is open.
struct Stats {
    static constexpr int SECONDS = 25;
    static constexpr int BYTES = 15;

    std::array<Counter, SECONDS> seconds;
    std::array<Counter, BYTES> bytes;
    Counter total_ns;
    Counter total_bytes;

    void add(std::int64_t took_ns, std::uint64_t nbytes) {
        int bucket = 0;
        for (std::int64_t bound = 10'000; bucket < SECONDS - 1 && took_ns > bound; bound *= 2) {
            ++bucket;
        }
        seconds[static_cast<std::size_t>(bucket)].add(1);
        bucket = 0;
        for (std::uint64_t bound = 64; bucket < BYTES - 1 && nbytes > bound; bound *= 4) ++bucket;
        bytes[static_cast<std::size_t>(bucket)].add(1);
        total_ns.add(static_cast<std::uint64_t>(took_ns));
        total_bytes.add(nbytes);
    }
};

}  // namespace potluck::shm
