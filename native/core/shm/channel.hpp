// One rank's end of a channel in shared memory: ticks, waiting for other ranks, waking them, and
// the channel's end.
//
// The synchronisation is that of a barrier with sequence numbers: a rank `arrive`s by counting its
// tick, and waits until other ranks' ticks have reached a number. Nothing here knows what is moved.
// One thread at a time drives a channel (Queue sees to that), so the members need no lock; only
// `stop` and `note_link_call` may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/shm/layout.hpp"

namespace potluck::shm {

enum class Outcome : int {
    DONE = 0,
    PENDING = 1,   // not ended yet
    STOPPED = 2,   // the group is over; another part of the engine knows why
    TIMEOUT = 3,   // `faulty_rank` had not come so far by the deadline
    DESYNC = 4,    // `faulty_rank` made another call
    LEFT = 5,      // `faulty_rank` closed its context
    CLOSED = 6,    // `faulty_rank` closed the sub-group of this channel, and not its context
};

// What a call waits for: `peer` (a rank or ALL) has reached `tick`. Once the waiting rank sleeps,
// it is woken only when `peer` is `ahead` ticks further: fewer context switches where ranks share
// a core.
struct Condition {
    int peer = ALL;
    std::uint32_t tick = 0;
    std::uint32_t ahead = 0;
};

class Channel {
public:
    // `memory` is zeroed when it is made, `shape.total_bytes()` long, and stays mapped as long as
    // the channel is used. `spin_ns`: how long a waiting rank spins; 0: ranks outnumber cores.
    Channel(void* memory, const Shape& shape, int rank, std::int64_t spin_ns);

    const int rank;
    const Shape shape;

    std::uint32_t tick() const { return tick_; }
    char* slot(int of_rank, std::uint32_t round) const {
        const auto index = static_cast<std::size_t>(of_rank) * shape.num_slots +
                           round % static_cast<std::uint32_t>(shape.num_slots);
        return slots_ + index * shape.slot_bytes +
               static_cast<std::size_t>(of_rank) * Shape::STAGGER;
    }

    bool shares_cores() const { return spin_ns_ == 0; }

    // A call begins: show its fingerprint to the other ranks.
    void publish(std::uint64_t fingerprint);
    // Whether `peer` (or one of ALL) made another call than this rank published last. If so,
    // `faulty_rank` is that rank and `peer_fingerprint` its call's. Valid only once `peer` has
    // ticked in the call: a tick publishes the fingerprint that was stored before it.
    bool has_mismatch(int peer, std::uint64_t fingerprint);

    // This rank has completed a round: count it, and wake the ranks that sleep until then.
    void arrive();

    bool is_met(const Condition& condition);
    // Block until `condition` is met (DONE), can't be met any more (the reason; `faulty_rank` is
    // the rank that it is about), or until the moment `until_ns` (PENDING).
    Outcome wait(const Condition& condition, std::int64_t until_ns);
    // Spin for a microsecond or two at most. Not at all where ranks share cores: the awaited rank
    // may need this very core.
    Outcome wait_briefly(const Condition& condition);
    // For a thread that waits for several channels at once: announces the sleep to the other ranks
    // and fills in the word to sleep on. Returns false if there is no need to sleep, because
    // `condition` is met or can't be met any more. `end_sleep` must follow in either case.
    bool prepare_sleep(const Condition& condition, Watch* watch);
    void end_sleep() { mine().wake_condition.store(0, std::memory_order_relaxed); }

    // Why `condition` can't be met any more; PENDING if it still can.
    Outcome reason_to_stop(const Condition& condition);
    // The first rank that has not reached `condition`, -1 if all have.
    int straggler(const Condition& condition) const;
    // Whether `peer` has not even begun the call that this rank began at tick `base`.
    bool has_not_called(int peer, std::uint32_t base) const;
    int faulty_rank = -1;
    std::uint64_t peer_fingerprint = 0;  // after DESYNC: of the faulty rank's call

    // The group is over on this rank; with `for_all` on every rank that maps this memory.
    void stop(bool for_all);
    bool is_stopped() const;
    // This rank makes no more calls: LEFT_GROUP or LEFT_CHANNEL.
    void leave(std::uint32_t how);

    // This rank makes call `sequence` over links: a peer that waits for it here raises DESYNC.
    void note_link_call(std::uint64_t sequence, std::uint64_t fingerprint);
    // The sequence number of the call under way, to compare with the peers' link calls.
    std::uint64_t sequence = 0;

private:
    RankState& state_of(int of_rank) const { return states_[of_rank]; }
    RankState& mine() const { return states_[rank]; }
    void wake(int of_rank);
    bool is_due(std::uint64_t wake_condition) const;
    bool shares_core_with_straggler(const Condition& condition) const;
    bool spin(const Condition& condition, int num_polls);
    bool spin_until(const Condition& condition);

    Header* header_;
    RankState* states_;
    char* slots_;
    std::uint32_t tick_ = 0;
    std::uint32_t num_calls_ = 0;
    std::uint32_t known_all_ = 0;
    std::vector<std::uint32_t> known_;
    std::int64_t spin_ns_;
    std::atomic<bool> stopped_{false};
};

}  // namespace potluck::shm
