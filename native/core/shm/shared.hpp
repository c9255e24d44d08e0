// What lies in the memory that the workers of one channel share.
//
//     header | one seat per rank | num_slots blocks of slot_bytes per rank, staggered
//
// Every word of the seats has one writer, the rank it belongs to, except `want` and `bell`. A rank
// counts the rounds it has completed in `tick`; what it wrote before a tick may be read by whoever
// has seen that tick. A block may have other writers than its rank, one at a time: the root of a
// broadcast, and whoever alone reads a line (copy.hpp). They, too, have ended before a tick
// that the next writer waits for. Of two ranks, one writes sums over the other's part, so whoever gave
// that must not need it any more: it combines its own part from where it was. There are no locks, so a
// worker that is killed can't hold one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/shm/wait.hpp"

namespace potluck::shm {

constexpr std::size_t LINE = 64;  // of the caches
constexpr int MAX_WORLD = 64;
constexpr int ALL = 0xffff;
constexpr std::uint32_t NUM_CALLS = 6;
constexpr std::uint32_t NUM_ELSEWHERE = 64;

struct Header {
    std::uint8_t magic[8];
    std::uint8_t token[32];
    alignas(64) Word aborted;
};

// A call that a rank has made over links instead of shared memory.
struct Elsewhere {
    std::atomic<std::uint64_t> number;
    std::atomic<std::uint64_t> fingerprint;
};

struct alignas(128) Seat {
    // One line, read by all: how far this rank is, in which of its last calls, and on which core (from
    // 1; 0: not told) it was at its last tick.
    Word tick;
    Word left;
    std::atomic<std::uint64_t> calls[NUM_CALLS];
    std::atomic<std::int32_t> core;

    // Another line: what this rank sleeps for (0: nothing), as `wish` packs it.
    alignas(128) std::atomic<std::uint64_t> want;
    Word bell;

    alignas(128) Elsewhere elsewhere[NUM_ELSEWHERE];
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(offsetof(Seat, core) + sizeof(Seat::core) <= LINE);

constexpr std::uint64_t wish(int who, std::uint32_t tick) {
    return 1ull << 63 | static_cast<std::uint64_t>(who) << 32 | tick;
}
constexpr int wisher_awaits(std::uint64_t wish) { return static_cast<int>(wish >> 32 & 0xffff); }
constexpr std::uint32_t wished_tick(std::uint64_t wish) { return static_cast<std::uint32_t>(wish); }

// Ticks wrap around: `a` is at least `b`.
constexpr bool reached(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::int32_t>(a - b) >= 0;
}

// The sizes that all ranks of a channel must agree on.
struct Shape {
    int world = 0;
    int num_slots = 0;
    std::size_t slot_bytes = 0;
    std::size_t small_bytes = 0;  // up to here everyone reduces everything

    static constexpr std::size_t PAGE = 4096;
    // If all ranks' slots began with a page, what is combined would share few sets of the first cache.
    static constexpr std::size_t STAGGER = 1088;

    std::size_t blocks_at() const {
        const std::size_t head = PAGE + static_cast<std::size_t>(world) * sizeof(Seat);
        return (head + PAGE - 1) / PAGE * PAGE;
    }
    std::size_t total_bytes() const {
        return blocks_at() + static_cast<std::size_t>(world) * (num_slots * slot_bytes + STAGGER);
    }
};

static_assert(sizeof(Header) <= Shape::PAGE);
static_assert(Shape::STAGGER % LINE == 0);

}  // namespace potluck::shm
