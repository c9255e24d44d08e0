// What lies in the memory that the workers of one channel share.
//
//     header | one seat per rank | num_slots blocks of slot_bytes per rank, staggered
//
// There are no locks, so a worker that is killed can't hold one. Two rules stand in their place:
//
// - *Seats.* A rank writes only its own seat. The exceptions are `want` and `bell`: the rank that
//   wakes a sleeper clears its `want` and raises its `bell`.
// - *Blocks.* A rank counts the rounds that it has completed in `tick`. What it wrote before a tick
//   may be read by every rank that has seen the tick. Before a rank writes a block again, it waits
//   for the ticks that say that all readers have finished with it.
//
// A block belongs to one rank, and mostly only that rank writes it. In three cases another rank
// does, one at a time, and the next writer waits for that rank's tick as well:
//
// - the root of a broadcast writes into the slots of all ranks (move.hpp);
// - the only reader of a cache line stores the value that is there, to claim the line (copy.hpp);
// - with two ranks, the sum is written over the contribution that the other rank gave. A rank can
//   therefore never read its own contribution from its slot: it reads it from the user's array.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/shm/wait.hpp"

namespace potluck::shm {

constexpr std::size_t LINE = 64;  // of the caches
constexpr int MAX_WORLD = 64;
constexpr int ALL = 0xffff;  // in place of a rank: every rank
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

// One rank's words. Those that other ranks poll are apart from those that other ranks write, so
// that a wake-up does not take the polled line away from its readers. 128 bytes, because the
// prefetcher of x86 processors fetches lines in pairs.
struct alignas(128) Seat {
    // One line, read by all: how far this rank is, the fingerprints of its last calls, and the core
    // (from 1; 0: not told) that it was on at its last tick.
    Word tick;
    Word left;
    std::atomic<std::uint64_t> calls[NUM_CALLS];
    std::atomic<std::int32_t> core;

    // Another line: what this rank sleeps for (0: it does not sleep), as `wish` packs it, and the
    // word that it sleeps on.
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
    std::size_t small_bytes = 0;  // up to here every rank reduces everything itself

    static constexpr std::size_t PAGE = 4096;
    // Offset between the slots of two ranks. The L1 cache picks a line's set by its address within
    // a page: if every rank's slot began at a page, the lines that are combined with each other
    // would all compete for the same few sets.
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
