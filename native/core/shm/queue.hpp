// The queue of one channel's calls, and the rule for which thread drives the channel.
//
// Calls of a channel run in the order in which they were made, one at a time, driven by one thread
// at a time: the caller of a blocking call, a thread that waits for an earlier call, or the progress
// thread. (Waiting threads make the progress, as in MPI.) A waiting thread that finds the channel
// driven by another one sleeps on its own `PendingCall`: the other thread moves the calls in order,
// and comes to it. The progress thread goes on to other channels.
//
// `lock_` guards the queue and the flag `is_driven_`. It is never held while a call moves, nor
// while another lock is taken.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "core/patience.hpp"
#include "core/shm/channel.hpp"
#include "core/shm/running_call.hpp"
#include "core/shm/stats.hpp"

namespace potluck::shm {

class ProgressThread;

// A completion queue: the ids of ended calls that Python must be told of, taken by one thread.
class Notifier {
public:
    void push(std::uint64_t id);
    // Blocks; the next id, or 0 once `close` was called and all ids were taken.
    std::uint64_t next();
    void close();

private:
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::uint64_t> ended_;
    bool is_closed_ = false;
};

// A call under way and its completion. The arrays that it names must stay until it has ended.
class PendingCall {
public:
    PendingCall(const Call& call, std::int64_t timeout_ns, std::uint64_t nbytes,
                std::uint64_t id = 0)
        : running(call),
          nbytes(nbytes),
          id(id),
          began_ns(now_ns()),
          deadline_ns_(began_ns + timeout_ns) {}
    // The same call, as far as `other` has come: a call that began on its caller's stack is handed
    // over to the progress thread. No thread may wait for `other`.
    PendingCall(const PendingCall& other)
        : running(other.running),
          nbytes(other.nbytes),
          id(other.id),
          began_ns(other.began_ns),
          deadline_ns_(other.deadline_ns_) {}
    PendingCall& operator=(const PendingCall&) = delete;

    bool is_done() const { return done_.load(std::memory_order_acquire) == ENDED; }
    // Push the id to the notifier when the call ends; false if it has ended.
    bool watch();
    // Set before `is_done`, whose store is a release: read them only after it.
    Outcome outcome = Outcome::PENDING;
    int faulty_rank = -1;
    std::uint64_t peer_fingerprint = 0;  // after DESYNC: of the faulty rank's call
    bool has_begun = true;               // whether the faulty rank has begun this call too

    RunningCall running;
    const std::uint64_t nbytes;
    const std::uint64_t id;
    const std::int64_t began_ns;
    std::int64_t deadline_ns() const {
        return std::max(deadline_ns_, static_cast<std::int64_t>(held_until_s() * 1e9));
    }

private:
    friend class Queue;
    static constexpr std::uint32_t OPEN = 0, ENDED = 1, AWAITED = 2;

    void end(Outcome how, Channel& channel);
    void publish(Notifier& notifier);
    void sleep(std::int64_t until_ns);

    const std::int64_t deadline_ns_;
    Word done_{OPEN};
    std::atomic<std::uint32_t> watched_{OPEN};
};

using PendingCallPtr = std::shared_ptr<PendingCall>;

class Queue {
public:
    // The queue keeps `memory`, which stays mapped as long as a thread may move a call. The thread
    // `progress_thread` drives the calls that no thread waits for. `notifier` gets the submitted
    // calls that fail or are watched.
    Queue(std::shared_ptr<void> memory, const Shape& shape, int rank, std::int64_t spin_ns,
          std::shared_ptr<ProgressThread> progress_thread, std::shared_ptr<Notifier> notifier);

    Channel channel;

    // A blocking call, without a queue entry. `reserve` the channel; false if another call comes
    // first (`submit` this one then). `run` the call in this thread until it has ended, which
    // releases the channel, or until `until_ns` (PENDING: `run` again, or `hand_over` to the
    // progress thread). `try_run` is a `run` that waits for other ranks a microsecond or two at
    // most, for callers that hold the interpreter lock.
    bool reserve();
    Outcome try_run(PendingCall& pending);
    Outcome run(PendingCall& pending, std::int64_t until_ns);
    void hand_over(PendingCallPtr pending);

    void submit(PendingCallPtr pending);
    // Block until the call has ended, driving the channel meanwhile; false at `until_ns`.
    bool wait(const PendingCallPtr& pending, std::int64_t until_ns);

    // For the progress thread: go on with the first calls as far as possible, without blocking.
    // BLOCKED: the first call waits for other ranks; `watch` is the word to sleep on, and
    // `until_ns` is lowered to the call's deadline. Never BLOCKED with `watch` null.
    enum class Poll { IDLE, MOVED, BLOCKED };
    Poll poll(Watch* watch, std::int64_t* until_ns);

    // The group is over, on this rank or on all: every call that waits ends with STOPPED.
    void stop(bool for_all);
    bool has_work();
    // The number of calls that have ended, if a call is under way; -1 if none is. So two equal
    // answers mean that the same call is still under way. From any thread.
    std::int64_t ongoing();
    // This rank makes no more calls.
    void leave() { channel.leave(LEFT_GROUP); }
    // This rank makes no more calls on this channel, that of a sub-group. The other ranks see it
    // when the calls under way have ended.
    void leave_channel();

    const Stats& stats(Kind kind) const { return stats_[static_cast<std::size_t>(kind)]; }
    // Nanoseconds that callers were blocked.
    std::uint64_t blocked_ns() const { return blocked_.get(); }

private:
    bool try_acquire();
    // No longer drive the channel; whether there are more calls.
    bool let_go();
    void release();
    PendingCallPtr front();
    // Alternate steps of the call and `wait(condition)`, until the call ends or `wait` is not DONE.
    template <class Wait>
    Outcome drive(PendingCall& pending, Wait&& wait);
    // A call that was `run` has ended: release the channel.
    void end(PendingCall& pending, Outcome outcome);
    void conclude(PendingCall& pending, Outcome outcome, std::int64_t now);
    void finish_front(const PendingCallPtr& pending, Outcome outcome);

    const std::shared_ptr<void> memory_;
    std::shared_ptr<ProgressThread> progress_thread_;
    std::shared_ptr<Notifier> notifier_;
    std::mutex lock_;
    bool is_driven_ = false;
    bool is_leaving_ = false;
    std::deque<PendingCallPtr> calls_;
    std::array<Stats, NUM_KINDS> stats_;
    Counter blocked_;
};

}  // namespace potluck::shm
