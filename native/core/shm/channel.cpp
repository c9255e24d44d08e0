#include "core/shm/channel.hpp"

#include <algorithm>

namespace potluck::shm {

namespace {

// A sleeper looks again after this time: the rank that should wake it may have been stopped or
// killed between its tick and the wake-up.
constexpr std::int64_t LONGEST_SLEEP_NS = 50'000'000;
// How often `has` is asked before the clock is read, and before a glance gives up. One look takes
// 10 to 50 ns; most waits end within a few.
constexpr int FEW_LOOKS = 8;
constexpr int MORE_LOOKS = 24;

}  // namespace

Channel::Channel(void* memory, const Shape& shape_, int rank_, std::int64_t spin_ns)
    : rank(rank_),
      shape(shape_),
      header_(static_cast<Header*>(memory)),
      seats_(reinterpret_cast<Seat*>(static_cast<char*>(memory) + Shape::PAGE)),
      blocks_(static_cast<char*>(memory) + shape_.blocks_at()),
      known_(static_cast<std::size_t>(shape_.world), 0),
      spin_ns_(spin_ns) {}

void Channel::publish(std::uint64_t fingerprint) {
    mine().calls[num_calls_ % NUM_CALLS].store(fingerprint, std::memory_order_relaxed);
    ++num_calls_;
}

bool Channel::has_dissenter(int who, std::uint64_t fingerprint) {
    const std::uint32_t index = (num_calls_ - 1) % NUM_CALLS;
    for (int other = 0; other < shape.world; ++other) {
        if (other == rank || (who != ALL && who != other)) continue;
        const std::uint64_t call = seat(other).calls[index].load(std::memory_order_relaxed);
        if (call == fingerprint) continue;
        faulty_rank = other;
        theirs = call;
        return true;
    }
    return false;
}

void Channel::arrive() {
    ++tick_;
    if (!shares_cores()) mine().core.store(current_core() + 1, std::memory_order_relaxed);
    // No wake-up may be lost (Dekker's pattern). This rank stores its tick, then loads each `want`;
    // a sleeper stores its `want`, then loads the ticks (prepare_sleep). All four are sequentially
    // consistent, so at least one of the two sees what the other has stored.
    mine().tick.store(tick_, std::memory_order_seq_cst);
    for (int i = 1; i < shape.world; ++i) {
        const int other = (rank + i) % shape.world;
        std::uint64_t want = seat(other).want.load(std::memory_order_seq_cst);
        // Several ranks may see the wish met. The one that clears it wakes the sleeper; the others
        // save the system call.
        if (want != 0 && is_met(want) && seat(other).want.compare_exchange_strong(want, 0)) {
            ring(other);
        }
    }
}

bool Channel::is_met(std::uint64_t wish) const {
    const int who = wisher_awaits(wish);
    const std::uint32_t wanted = wished_tick(wish);
    const int first = who == ALL ? 0 : who;
    const int last = who == ALL ? shape.world - 1 : std::min(who, shape.world - 1);
    for (int other = first; other <= last; ++other) {
        if (!reached(seat(other).tick.load(std::memory_order_seq_cst), wanted)) return false;
    }
    return true;
}

void Channel::ring(int of_rank) {
    seat(of_rank).bell.fetch_add(1, std::memory_order_seq_cst);
    wake_all(seat(of_rank).bell);
}

// `known_` and `known_all_` are the newest ticks that this rank has seen. Ticks only rise, so a
// need that they meet is met for good, and costs no look at a line that another core is writing.
bool Channel::has(const Need& need) {
    if (need.who != ALL) {
        const auto who = static_cast<std::size_t>(need.who);
        if (reached(known_[who], need.tick)) return true;
        known_[who] = seat(need.who).tick.load(std::memory_order_acquire);
        return reached(known_[who], need.tick);
    }
    if (reached(known_all_, need.tick)) return true;
    std::uint32_t least = tick_;
    for (int i = 1; i < shape.world; ++i) {
        const int other = (rank + i) % shape.world;
        auto& known = known_[static_cast<std::size_t>(other)];
        if (!reached(known, need.tick)) {
            known = seat(other).tick.load(std::memory_order_acquire);
            if (!reached(known, need.tick)) return false;
        }
        if (!reached(known, least)) least = known;
    }
    known_all_ = least;
    return true;
}

Outcome Channel::reason_to_stop(const Need& need) {
    if (is_stopped()) return Outcome::STOPPED;
    for (int other = 0; other < shape.world; ++other) {
        if (other == rank || (need.who != ALL && need.who != other)) continue;
        const Seat& their = seat(other);
        if (reached(their.tick.load(std::memory_order_acquire), need.tick)) continue;
        // A rank that makes this very call over links will never tick for it here.
        const Elsewhere& entry = their.elsewhere[number % NUM_ELSEWHERE];
        if (entry.number.load(std::memory_order_acquire) == number + 1) {
            faulty_rank = other;
            theirs = entry.fingerprint.load(std::memory_order_relaxed);
            return Outcome::DESYNC;
        }
        // The tick is loaded again: a rank may complete its round and leave between the two loads.
        if (their.left.load(std::memory_order_acquire) != 0 &&
            !reached(their.tick.load(std::memory_order_acquire), need.tick)) {
            faulty_rank = other;
            return Outcome::LEFT;
        }
    }
    return Outcome::PENDING;
}

int Channel::laggard(const Need& need) const {
    for (int other = 0; other < shape.world; ++other) {
        if (other == rank || (need.who != ALL && need.who != other)) continue;
        if (!reached(seat(other).tick.load(std::memory_order_acquire), need.tick)) return other;
    }
    return -1;
}

bool Channel::has_not_called(int who, std::uint32_t base) const {
    return !reached(seat(who).tick.load(std::memory_order_acquire), base + 1);
}

bool Channel::prepare_sleep(const Need& need, Watch* watch) {
    Seat& me = mine();
    *watch = {&me.bell, me.bell.load(std::memory_order_seq_cst)};
    me.want.store(wish(need.who, need.tick + need.ahead), std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return !has({need.who, need.tick + need.ahead}) && reason_to_stop(need) == Outcome::PENDING;
}

// Whether the first rank that is awaited was last seen on this very core. Then spinning keeps it
// from running, and the system may take many milliseconds to move one of the two to another core.
bool Channel::is_in_the_way(const Need& need) const {
    const int late = laggard(need), here = current_core() + 1;
    return late >= 0 && here > 0 && seat(late).core.load(std::memory_order_relaxed) == here;
}

bool Channel::looks_for(const Need& need, int looks) {
    for (int look = 0; look < looks; ++look) {
        relax();
        if (has(need)) return true;
    }
    return false;
}

bool Channel::spins_until(const Need& need) {
    std::int64_t until = 0;  // most waits end before the clock needs to be read
    while (true) {
        if (looks_for(need, FEW_LOOKS)) return true;
        if (is_in_the_way(need)) yield();
        const std::int64_t now = now_ns();
        if (until == 0) until = now + spin_ns_;
        if (now >= until || is_stopped()) return false;
    }
}

Outcome Channel::glance(const Need& need) {
    const bool is_met =
        has(need) || (!shares_cores() && (looks_for(need, FEW_LOOKS) ||
                                          (!is_in_the_way(need) && looks_for(need, MORE_LOOKS))));
    return is_met ? Outcome::DONE : Outcome::PENDING;
}

Outcome Channel::wait(const Need& need, std::int64_t until_ns) {
    if (has(need)) return Outcome::DONE;
    if (spin_ns_ > 0 && spins_until(need)) return Outcome::DONE;
    if (is_stopped()) return Outcome::STOPPED;
    // Yield before sleeping. Where ranks outnumber cores the awaited rank may be ready to run on
    // this core, and a yield costs a third of a sleep with its wake-up. One turn for each rank.
    for (int turn = 0; turn < shape.world; ++turn) {
        yield();
        if (has(need)) return Outcome::DONE;
        if (is_stopped()) return Outcome::STOPPED;
    }
    while (true) {
        Watch watch{};
        if (prepare_sleep(need, &watch)) {
            const std::int64_t left = until_ns - now_ns();
            if (left > 0) sleep_on(watch, std::min(left, LONGEST_SLEEP_NS));
        }
        awake();
        if (has(need)) return Outcome::DONE;
        const Outcome reason = reason_to_stop(need);
        if (reason != Outcome::PENDING) return reason;
        if (now_ns() >= until_ns) return Outcome::PENDING;
    }
}

void Channel::stop(bool for_all) {
    stopped_.store(true, std::memory_order_seq_cst);
    if (!for_all) {
        ring(rank);
        return;
    }
    header_->aborted.store(1, std::memory_order_seq_cst);
    for (int other = 0; other < shape.world; ++other) ring(other);
}

bool Channel::is_stopped() const {
    return stopped_.load(std::memory_order_relaxed) ||
           header_->aborted.load(std::memory_order_relaxed) != 0;
}

void Channel::leave() {
    mine().left.store(1, std::memory_order_seq_cst);
    for (int other = 0; other < shape.world; ++other) ring(other);
}

void Channel::note_elsewhere(std::uint64_t number_, std::uint64_t fingerprint) {
    Elsewhere& entry = mine().elsewhere[number_ % NUM_ELSEWHERE];
    entry.fingerprint.store(fingerprint, std::memory_order_relaxed);
    entry.number.store(number_ + 1, std::memory_order_release);
}

}  // namespace potluck::shm
