// One rank's place in the shared memory of a channel: ticks, waiting, waking, the end.
//
// Nothing here knows what is moved. One thread at a time drives a channel (see Queue); `stop` and
// `note_elsewhere` may come from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/shm/shared.hpp"

namespace potluck::shm {

enum class Outcome : int {
    DONE = 0,
    PENDING = 1,   // not ended yet
    STOPPED = 2,   // the group is over; somebody else knows why
    TIMEOUT = 3,   // `faulty_rank` has not come so far
    DESYNC = 4,    // `faulty_rank` made another call
    LEFT = 5,      // `faulty_rank` closed its context
};

// What a call waits for: that `who` (a rank or ALL) has reached `tick`. A rank that has gone to
// sleep over it is woken only when `who` is `ahead` ticks further, so that ranks which share a core
// change places less often.
struct Need {
    int who = ALL;
    std::uint32_t tick = 0;
    std::uint32_t ahead = 0;
};

class Channel {
public:
    // `memory` is mapped for as long as the channel is used, zeroed when it was made, and
    // `shape.total_bytes()` long.
    Channel(void* memory, const Shape& shape, int rank, std::int64_t spin_ns);

    const int rank;
    const Shape shape;

    std::uint32_t tick() const { return tick_; }
    char* slot(int of_rank, std::uint32_t round) const {
        const auto index = static_cast<std::size_t>(of_rank) * shape.num_slots +
                           round % static_cast<std::uint32_t>(shape.num_slots);
        return blocks_ + index * shape.slot_bytes +
               static_cast<std::size_t>(of_rank) * Shape::STAGGER;
    }

    // Whether there are more ranks than cores.
    bool shares_cores() const { return spin_ns_ == 0; }

    // A call begins: show its fingerprint to the other ranks.
    void publish(std::uint64_t fingerprint);
    // Whether one of `who` made another call than this rank published last; then `faulty_rank` is that
    // rank and `theirs` its fingerprint. Valid only once `who` have ticked in the call.
    bool has_dissenter(int who, std::uint64_t fingerprint);

    // This rank has completed a round; wakes the ranks that sleep until then.
    void arrive();

    bool has(const Need& need);
    // Block until `need` is met (DONE) or can't be (then `faulty_rank` is why), or
    // until the moment `until_ns` (PENDING).
    Outcome wait(const Need& need, std::int64_t until_ns);
    // The same, but for a microsecond or two at most, and not where ranks share cores: there the
    // rank that is awaited may need this core to come.
    Outcome glance(const Need& need);
    // For a thread that waits for several channels: fills in what to sleep on; false if `need` is
    // met, or can't be, so that there is no need to sleep.
    bool prepare_sleep(const Need& need, Watch* watch);
    void awake() { mine().want.store(0, std::memory_order_relaxed); }

    // Why `need` can't be met any more; PENDING if it still can.
    Outcome reason_to_stop(const Need& need);
    // The rank that holds up `need`, -1 if none does.
    int laggard(const Need& need) const;
    // Whether `who` has not even begun the current call.
    bool has_not_called(int who, std::uint32_t base) const;
    int faulty_rank = -1;
    // After DESYNC: the fingerprint of its call.
    std::uint64_t theirs = 0;

    // The group is over here; with `for_all` also for all that look into this memory.
    void stop(bool for_all);
    bool is_stopped() const;
    // This rank makes no more calls.
    void leave();

    // This rank makes call `number` over links.
    void note_elsewhere(std::uint64_t number, std::uint64_t fingerprint);
    // The number of the call under way, for comparing with what the others made elsewhere.
    std::uint64_t number = 0;

private:
    Seat& seat(int of_rank) const { return seats_[of_rank]; }
    Seat& mine() const { return seats_[rank]; }
    void ring(int of_rank);
    bool is_met(std::uint64_t wish) const;
    bool is_in_the_way(const Need& need) const;
    bool looks_for(const Need& need, int looks);
    bool spins_until(const Need& need);

    Header* header_;
    Seat* seats_;
    char* blocks_;
    std::uint32_t tick_ = 0;
    std::uint32_t num_calls_ = 0;
    std::uint32_t known_all_ = 0;
    std::vector<std::uint32_t> known_;
    std::int64_t spin_ns_;
    std::atomic<bool> stopped_{false};
};

}  // namespace potluck::shm
