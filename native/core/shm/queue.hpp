// The queue of one channel's calls, and which thread moves them.
//
// One thread at a time drives a channel: the caller of a blocking call, a thread that waits for an
// earlier call, or the engine thread. A caller that finds the channel driven by another thread
// sleeps on its own ticket, since that thread moves the calls in order and comes to it; the engine
// thread goes on to other channels.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "core/shm/channel.hpp"
#include "core/shm/move.hpp"
#include "core/shm/stats.hpp"

namespace potluck::shm {

class Engine;

// The ids of calls that have ended and that Python wants to hear of, for one thread to take.
class Notifier {
public:
    void push(std::uint64_t id);
    // The next one, 0 once `close` was called.
    std::uint64_t next();
    void close();

private:
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::uint64_t> ended_;
    bool is_closed_ = false;
};

// A call under way. Its memory must stay until it has ended.
class Ticket {
public:
    Ticket(const Call& call, std::int64_t timeout_ns, std::uint64_t nbytes, std::uint64_t id = 0)
        : movement(call),
          nbytes(nbytes),
          id(id),
          began_ns(now_ns()),
          deadline_ns(began_ns + timeout_ns) {}
    // The same call, as far as `other` has come. For a call that began on its caller's stack and is
    // handed over to the engine thread; no thread may wait for `other` yet.
    Ticket(const Ticket& other)
        : movement(other.movement),
          nbytes(other.nbytes),
          id(other.id),
          began_ns(other.began_ns),
          deadline_ns(other.deadline_ns) {}
    Ticket& operator=(const Ticket&) = delete;

    bool is_done() const { return done_.load(std::memory_order_acquire) == ENDED; }
    // Let the notifier tell when it ends; false if it has.
    bool watch();
    // These are set before it is done.
    Outcome outcome = Outcome::PENDING;
    int faulty_rank = -1;
    std::uint64_t theirs = 0;  // DESYNC: the fingerprint of that rank's call
    bool has_begun = true;  // that rank has begun this call too

    Movement movement;
    const std::uint64_t nbytes;
    const std::uint64_t id;
    const std::int64_t began_ns;
    const std::int64_t deadline_ns;

private:
    friend class Queue;
    static constexpr std::uint32_t OPEN = 0, ENDED = 1, AWAITED = 2;

    void end(Outcome how, Channel& channel);
    void publish(Notifier& notifier);
    void sleep(std::int64_t until_ns);

    Word done_{OPEN};
    std::atomic<std::uint32_t> watched_{OPEN};
};

using Tickets = std::shared_ptr<Ticket>;

class Queue {
public:
    // `engine` drives the calls that no thread waits for; `notifier` hears of submitted calls that
    // fail and of those that are watched.
    Queue(void* memory, const Shape& shape, int rank, std::int64_t spin_ns,
          std::shared_ptr<Engine> engine, std::shared_ptr<Notifier> notifier);

    Channel channel;

    // A blocking call in three steps: `reserve` the channel; false if another call is before it
    // (then `submit` this one). `run` the call in this thread until it has ended, which gives the
    // channel back, or until `until_ns` (PENDING: run on, or `hand_over`). `dash` is a `run` that
    // waits for other ranks a microsecond or two at most, for callers that hold a lock.
    bool reserve();
    Outcome dash(Ticket& ticket);
    Outcome run(Ticket& ticket, std::int64_t until_ns);
    void hand_over(Tickets ticket);

    void submit(Tickets ticket);
    // Block until the call has ended, moving the channel meanwhile; false at `until_ns`.
    bool wait(const Tickets& ticket, std::int64_t until_ns);

    // For the engine thread: go on with what is first. `watch` is filled in if there is something
    // to wait for and nothing can be done now (`until_ns` is lowered to its deadline).
    enum class Poll { IDLE, MOVED, BLOCKED };
    Poll poll(Watch* watch, std::int64_t* until_ns);

    // The group is over, here or for all: everything that waits ends with STOPPED.
    void stop(bool for_all);
    bool has_work();
    // The number of calls that have ended, if a call is under way; -1 if none is. Two equal
    // answers: the same call. For any thread.
    std::int64_t ongoing();
    // This rank makes no more calls.
    void leave() { channel.leave(); }

    const Stats& stats(Kind kind) const { return stats_[static_cast<std::size_t>(kind)]; }
    // Nanoseconds that callers were blocked.
    std::uint64_t blocked_ns() const { return blocked_.get(); }

private:
    bool take();
    void release();
    Tickets front();
    // Step by step; `wait(need)` between them, until it is not DONE.
    template <class Wait>
    Outcome drive(Ticket& ticket, Wait&& wait);
    // A call that was `run` is over: give the channel back.
    void end(Ticket& ticket, Outcome outcome);
    void conclude(Ticket& ticket, Outcome outcome, std::int64_t now);
    void finish_front(const Tickets& ticket, Outcome outcome);

    std::shared_ptr<Engine> engine_;
    std::shared_ptr<Notifier> notifier_;
    std::mutex lock_;
    bool is_driven_ = false;
    std::deque<Tickets> calls_;
    std::array<Stats, NUM_KINDS> stats_;
    Counter blocked_;
};

}  // namespace potluck::shm
