// The layout of the memory that the workers of one channel share.
//
//     header | the state of each rank | num_slots slots of slot_bytes per rank, staggered
//
// There are no locks, because a worker can be killed while it holds one. Two single-writer rules
// stand in their place:
//
// - *Rank states.* A rank writes only its own `RankState`. The exceptions are `wake_condition` and
//   `doorbell`: the rank that wakes a sleeper clears the one and increments the other.
// - *Slots.* `tick` counts the rounds that a rank has completed; a store of `tick` publishes all
//   that the rank has written before it (store-release, load-acquire). A rank that has seen the
//   tick may read those slots. Before a slot is written again, its writer waits for the ticks that
//   say that all readers of the slot have finished (RunningCall::when_slot_is_free). This is the
//   usual ring buffer of a single producer, with one consumer index per reader.
//
// A slot belongs to one rank, and mostly only that rank writes it. In three cases another rank
// writes, at a time when no other rank uses those bytes, and the next writer waits for that rank's
// tick as well:
//
// - the root of a broadcast writes into the slots of all ranks (running_call.hpp);
// - the only reader of a cache line stores the value that is there, to claim the line (copy.hpp);
// - with two ranks, each writes its sum over the other rank's contribution. A rank can therefore
//   not read its own contribution from its slot; it reads the user's array.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/shm/wait.hpp"

namespace potluck::shm {

constexpr std::size_t LINE = 64;  // bytes of a cache line
constexpr int MAX_WORLD = 64;
constexpr int ALL = 0xffff;  // in place of a rank: every rank
// Fingerprints kept of a rank's last calls. A rank that has not yet compared its call finds the
// peers' fingerprints of that call as long as no peer is this many calls ahead. With 4 slots none
// is more than three ahead: a writer would find no free slot, and a reader no data.
constexpr std::uint32_t NUM_CALLS = 6;
constexpr std::uint32_t NUM_LINK_CALLS = 64;

// What `RankState::has_left` says: the rank has closed its context, or only the sub-group that this
// channel is of.
constexpr std::uint32_t LEFT_GROUP = 1, LEFT_CHANNEL = 2;

struct Header {
    std::uint8_t magic[8];
    std::uint8_t token[32];
    alignas(64) Word aborted;
};

// A call that a rank has made over links instead of shared memory. `sequence` is the call's number
// plus 1 (fresh memory is zero, and calls count from 0), and is stored after `fingerprint`.
struct LinkCall {
    std::atomic<std::uint64_t> sequence;
    std::atomic<std::uint64_t> fingerprint;
};

// What one rank shows to the others. The words that other ranks poll lie apart from the words that
// other ranks write: a wake-up would otherwise take the polled line away from all its readers
// (false sharing). 128 bytes apart, because the prefetcher of x86 processors fetches pairs of
// lines.
struct alignas(128) RankState {
    // One line, polled by all. `core` is the processor that the rank was on at its last tick,
    // counted from 1; 0: not told. It is a hint only, so it needs no order.
    Word tick;
    Word has_left;
    std::atomic<std::uint64_t> calls[NUM_CALLS];
    std::atomic<std::int32_t> core;

    // Another line: what this rank sleeps for (`pack_condition`; 0: it does not sleep), and the
    // futex word that it sleeps on.
    alignas(128) std::atomic<std::uint64_t> wake_condition;
    Word doorbell;

    alignas(128) LinkCall link_calls[NUM_LINK_CALLS];
};

// An atomic with a lock inside would have one lock per process, and exclude no other process.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(offsetof(RankState, core) + sizeof(RankState::core) <= LINE);

// "Wake me when `peer` (or ALL) has reached `tick`", in one word, so that a waker never sees the
// rank of one condition with the tick of another. The top bit tells a condition from 0.
constexpr std::uint64_t pack_condition(int peer, std::uint32_t tick) {
    return 1ull << 63 | static_cast<std::uint64_t>(peer) << 32 | tick;
}
constexpr int condition_peer(std::uint64_t packed) {
    return static_cast<int>(packed >> 32 & 0xffff);
}
constexpr std::uint32_t condition_tick(std::uint64_t packed) {
    return static_cast<std::uint32_t>(packed);
}

// Whether tick `a` is at least `b`. Ticks wrap around after 2^32 rounds, so they are compared by
// their difference, as TCP compares sequence numbers. Right while the two are less than 2^31 apart.
constexpr bool reached(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::int32_t>(a - b) >= 0;
}

// The sizes that all ranks of a channel must agree on.
struct Shape {
    int world = 0;
    int num_slots = 0;
    std::size_t slot_bytes = 0;
    std::size_t small_bytes = 0;  // up to this size every rank reduces the whole array itself

    static constexpr std::size_t PAGE = 4096;
    // Offset between the slots of two ranks. The L1 cache picks a line's set by its address within
    // a page: if every rank's slot began at a page, the lines that are combined with each other
    // would all compete for the same few sets.
    static constexpr std::size_t STAGGER = 1088;

    std::size_t slots_at() const {
        const std::size_t head = PAGE + static_cast<std::size_t>(world) * sizeof(RankState);
        return (head + PAGE - 1) / PAGE * PAGE;
    }
    std::size_t total_bytes() const {
        return slots_at() + static_cast<std::size_t>(world) * (num_slots * slot_bytes + STAGGER);
    }
};

static_assert(sizeof(Header) <= Shape::PAGE);
static_assert(Shape::STAGGER % LINE == 0);

}  // namespace potluck::shm
