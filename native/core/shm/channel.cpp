#include "core/shm/channel.hpp"

#include <algorithm>

namespace potluck::shm {

namespace {

// A sleeper looks at the ticks again after this time: the rank that should wake it may have been
// stopped or killed between its tick and the wake-up, and no other rank would make up for it.
constexpr std::int64_t MAX_SLEEP_NS = 50'000'000;
// Polls of the ticks before the clock is read, and before `wait_briefly` gives up. One poll takes
// 10 to 50 ns; most waits end within a few.
constexpr int FEW_POLLS = 8;
constexpr int MORE_POLLS = 24;

}  // namespace

Channel::Channel(void* memory, const Shape& shape_, int rank_, std::int64_t spin_ns)
    : rank(rank_),
      shape(shape_),
      header_(static_cast<Header*>(memory)),
      states_(reinterpret_cast<RankState*>(static_cast<char*>(memory) + Shape::PAGE)),
      slots_(static_cast<char*>(memory) + shape_.slots_at()),
      known_(static_cast<std::size_t>(shape_.world), 0),
      spin_ns_(spin_ns) {}

// Relaxed: the tick that follows publishes the fingerprint.
void Channel::publish(std::uint64_t fingerprint) {
    mine().calls[num_calls_ % NUM_CALLS].store(fingerprint, std::memory_order_relaxed);
    ++num_calls_;
}

bool Channel::has_mismatch(int peer, std::uint64_t fingerprint) {
    const std::uint32_t index = (num_calls_ - 1) % NUM_CALLS;
    for (int other = 0; other < shape.world; ++other) {
        if (other == rank || (peer != ALL && peer != other)) continue;
        const std::uint64_t call = state_of(other).calls[index].load(std::memory_order_relaxed);
        if (call == fingerprint) continue;
        faulty_rank = other;
        peer_fingerprint = call;
        return true;
    }
    return false;
}

void Channel::arrive() {
    ++tick_;
    if (!shares_cores()) mine().core.store(current_core() + 1, std::memory_order_relaxed);
    // No wake-up may be lost (Dekker's pattern). This rank stores its tick, then loads each
    // `wake_condition`; a sleeper stores its `wake_condition`, then loads the ticks
    // (prepare_sleep). All four are sequentially consistent, so at least one of the two sees what
    // the other has stored. With release and acquire alone both loads could come before both
    // stores, and the sleeper would sleep on a tick that is there.
    // The store is a release too: all that this rank has written into slots precedes it.
    mine().tick.store(tick_, std::memory_order_seq_cst);
    for (int i = 1; i < shape.world; ++i) {
        const int other = (rank + i) % shape.world;
        auto& wake_condition = state_of(other).wake_condition;
        std::uint64_t sleeps_for = wake_condition.load(std::memory_order_seq_cst);
        // Several ranks may find the condition met. Only the rank whose exchange clears it makes
        // the system call. The exchange fails as well if the sleeper has gone on to another
        // condition meanwhile: that one is checked by the ranks that tick after it was stored.
        if (sleeps_for != 0 && is_due(sleeps_for) &&
            wake_condition.compare_exchange_strong(sleeps_for, 0)) {
            wake(other);
        }
    }
}

// Whether a sleeper's condition is met. It comes from shared memory, so its rank is bounded here.
bool Channel::is_due(std::uint64_t wake_condition) const {
    const int peer = condition_peer(wake_condition);
    const std::uint32_t wanted = condition_tick(wake_condition);
    const int first = peer == ALL ? 0 : peer;
    const int last = peer == ALL ? shape.world - 1 : std::min(peer, shape.world - 1);
    for (int other = first; other <= last; ++other) {
        if (!reached(state_of(other).tick.load(std::memory_order_seq_cst), wanted)) return false;
    }
    return true;
}

// The doorbell changes before the system call: a thread that has read the old value, and is about
// to sleep on it, is turned back by the kernel (futex(2)).
void Channel::wake(int of_rank) {
    state_of(of_rank).doorbell.fetch_add(1, std::memory_order_seq_cst);
    wake_all(state_of(of_rank).doorbell);
}

// `known_` and `known_all_` are the newest ticks that this rank has seen: ticks only rise, so a
// condition that these meet is met for good, without a load from a line that another core writes.
// (`reached` is right as long as a cached tick is less than 2^31 rounds old. A reader of broadcasts
// looks at no rank but the root, and so must reach an all-rank call within 2^31 rounds.)
// The loads are acquire: the slots that a peer wrote before its tick are read after this.
bool Channel::is_met(const Condition& condition) {
    if (condition.peer != ALL) {
        const auto peer = static_cast<std::size_t>(condition.peer);
        if (reached(known_[peer], condition.tick)) return true;
        known_[peer] = state_of(condition.peer).tick.load(std::memory_order_acquire);
        return reached(known_[peer], condition.tick);
    }
    if (reached(known_all_, condition.tick)) return true;
    std::uint32_t least = tick_;
    for (int i = 1; i < shape.world; ++i) {
        const int other = (rank + i) % shape.world;
        auto& known = known_[static_cast<std::size_t>(other)];
        if (!reached(known, condition.tick)) {
            known = state_of(other).tick.load(std::memory_order_acquire);
            if (!reached(known, condition.tick)) return false;
        }
        if (!reached(known, least)) least = known;
    }
    known_all_ = least;
    return true;
}

Outcome Channel::reason_to_stop(const Condition& condition) {
    if (is_stopped()) return Outcome::STOPPED;
    for (int other = 0; other < shape.world; ++other) {
        if (other == rank || (condition.peer != ALL && condition.peer != other)) continue;
        const RankState& their = state_of(other);
        if (reached(their.tick.load(std::memory_order_acquire), condition.tick)) continue;
        // A rank that makes this very call over links will never tick for it here. (Its fingerprint
        // may already be that of a call 64 later; only the text of the error depends on it.)
        const LinkCall& entry = their.link_calls[sequence % NUM_LINK_CALLS];
        if (entry.sequence.load(std::memory_order_acquire) == sequence + 1) {
            faulty_rank = other;
            peer_fingerprint = entry.fingerprint.load(std::memory_order_relaxed);
            return Outcome::DESYNC;
        }
        // The tick is loaded again: a peer may have completed its round and then left between the
        // two loads, and what it completed still counts.
        const std::uint32_t left = their.has_left.load(std::memory_order_acquire);
        if (left != 0 && !reached(their.tick.load(std::memory_order_acquire), condition.tick)) {
            faulty_rank = other;
            return left == LEFT_CHANNEL ? Outcome::CLOSED : Outcome::LEFT;
        }
    }
    return Outcome::PENDING;
}

int Channel::straggler(const Condition& condition) const {
    for (int other = 0; other < shape.world; ++other) {
        if (other == rank || (condition.peer != ALL && condition.peer != other)) continue;
        const std::uint32_t tick = state_of(other).tick.load(std::memory_order_acquire);
        if (!reached(tick, condition.tick)) return other;
    }
    return -1;
}

bool Channel::has_not_called(int peer, std::uint32_t base) const {
    return !reached(state_of(peer).tick.load(std::memory_order_acquire), base + 1);
}

// The order matters. The doorbell is read first, so that any later ring makes the sleep return at
// once. Then the condition is announced, and only then are the ticks (and the reasons to stop)
// looked at: see `arrive`. The fence is needed because those loads are acquire, which alone may be
// done before the store.
bool Channel::prepare_sleep(const Condition& condition, Watch* watch) {
    RankState& me = mine();
    const std::uint32_t wanted = condition.tick + condition.ahead;
    *watch = {&me.doorbell, me.doorbell.load(std::memory_order_seq_cst)};
    me.wake_condition.store(pack_condition(condition.peer, wanted), std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return !is_met({condition.peer, wanted}) && reason_to_stop(condition) == Outcome::PENDING;
}

// Whether the first awaited rank was last seen on this very core. Spinning would then keep that
// rank from running, and the scheduler may take many milliseconds to move one of the two.
bool Channel::shares_core_with_straggler(const Condition& condition) const {
    const int late = straggler(condition), here = current_core() + 1;
    return late >= 0 && here > 0 && state_of(late).core.load(std::memory_order_relaxed) == here;
}

bool Channel::spin(const Condition& condition, int num_polls) {
    for (int poll = 0; poll < num_polls; ++poll) {
        relax();
        if (is_met(condition)) return true;
    }
    return false;
}

bool Channel::spin_until(const Condition& condition) {
    std::int64_t until = 0;  // most waits end before the clock needs to be read
    while (true) {
        if (spin(condition, FEW_POLLS)) return true;
        if (shares_core_with_straggler(condition)) yield();
        const std::int64_t now = now_ns();
        if (until == 0) until = now + spin_ns_;
        if (now >= until || is_stopped()) return false;
    }
}

Outcome Channel::wait_briefly(const Condition& condition) {
    if (is_met(condition)) return Outcome::DONE;
    if (shares_cores()) return Outcome::PENDING;
    if (spin(condition, FEW_POLLS)) return Outcome::DONE;
    if (shares_core_with_straggler(condition)) return Outcome::PENDING;
    return spin(condition, MORE_POLLS) ? Outcome::DONE : Outcome::PENDING;
}

Outcome Channel::wait(const Condition& condition, std::int64_t until_ns) {
    if (is_met(condition)) return Outcome::DONE;
    if (spin_ns_ > 0 && spin_until(condition)) return Outcome::DONE;
    if (is_stopped()) return Outcome::STOPPED;
    // Yield before sleeping. Where ranks outnumber cores the awaited rank may be ready to run on
    // this core, and a yield costs a third of a sleep with its wake-up. One yield for each rank, so
    // that each of them can have had a turn. To yield for longer measured worse: next to other
    // programs eight ranks took 85 us for 4 KiB with 20 us of yielding, 42 us with this.
    for (int turn = 0; turn < shape.world; ++turn) {
        yield();
        if (is_met(condition)) return Outcome::DONE;
        if (is_stopped()) return Outcome::STOPPED;
    }
    while (true) {
        Watch watch{};
        if (prepare_sleep(condition, &watch)) {
            const std::int64_t left = until_ns - now_ns();
            if (left > 0) sleep_on(watch, std::min(left, MAX_SLEEP_NS));
        }
        end_sleep();
        if (is_met(condition)) return Outcome::DONE;
        const Outcome reason = reason_to_stop(condition);
        if (reason != Outcome::PENDING) return reason;
        if (now_ns() >= until_ns) return Outcome::PENDING;
    }
}

// The flag is set before the doorbell rings: a woken thread finds it in `reason_to_stop`.
void Channel::stop(bool for_all) {
    stopped_.store(true, std::memory_order_seq_cst);
    if (!for_all) {
        wake(rank);
        return;
    }
    header_->aborted.store(1, std::memory_order_seq_cst);
    for (int other = 0; other < shape.world; ++other) wake(other);
}

// Relaxed: only the flags matter, no memory is read because of them.
bool Channel::is_stopped() const {
    return stopped_.load(std::memory_order_relaxed) ||
           header_->aborted.load(std::memory_order_relaxed) != 0;
}

void Channel::leave(std::uint32_t how) {
    mine().has_left.store(how, std::memory_order_seq_cst);
    for (int other = 0; other < shape.world; ++other) wake(other);
}

void Channel::note_link_call(std::uint64_t call_sequence, std::uint64_t fingerprint) {
    LinkCall& entry = mine().link_calls[call_sequence % NUM_LINK_CALLS];
    entry.fingerprint.store(fingerprint, std::memory_order_relaxed);
    entry.sequence.store(call_sequence + 1, std::memory_order_release);
}

}  // namespace potluck::shm
