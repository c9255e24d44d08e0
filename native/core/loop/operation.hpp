// An operation under way (a collective, a send or a receive), and its ticket: the completion object
// on which the caller waits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace potluck {

// Seconds of the monotonic clock, the one that Python's time.monotonic() reads.
inline double now_s() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

// (rank, what an operation waits for from that rank); rank -1: any rank.
using Awaited = std::pair<int, std::string>;

// Is told of operations that ended while no thread waited for their tickets.
class CompletionListener {
public:
    virtual ~CompletionListener() = default;
    virtual void ended(uint64_t id) = 0;
};

// The completion of one operation. The loop finishes it; any thread may wait for it.
//
// Shared from itself because of the binding: nanobind then passes this shared_ptr to the loop.
// Otherwise it would pass one that owns the Python object, whose release needs the interpreter
// lock, for which the loop's thread must never wait.
class Ticket : public std::enable_shared_from_this<Ticket> {
public:
    enum class State { running, done, refused, failed };

    Ticket(uint64_t id, std::weak_ptr<CompletionListener> listener)
        : id(id), listener_(std::move(listener)) {}

    const uint64_t id;

    // How many elements this rank has encoded that are beyond the codec's range.
    std::atomic<uint64_t> num_beyond{0};

    // Block until the operation has ended or the time is over.
    State wait_for(double seconds);
    State state();
    double seconds();
    int source();

    // The end of a claimed ticket is not reported to the listener: the claiming thread waits for
    // the ticket and handles its end. `unclaim` reports an end that came meanwhile, so that none is
    // lost when a wait times out just as the operation ends.
    void claim();
    void unclaim();

    // The operation has ended, after so many seconds; `source`: the rank that a message came from.
    // `refused`: it never began, because the group is over or being left. `failed`: the group ended
    // while it was under way. Only the first call counts.
    void finish(State state, double seconds, int source = -1);

private:
    std::weak_ptr<CompletionListener> listener_;
    std::mutex mutex_;
    std::condition_variable changed_;
    State state_ = State::running;
    double seconds_ = 0;
    int source_ = -1;
    int claims_ = 0;
};

// An operation under way, as far as deadlines, departures and errors are concerned.
class Operation {
public:
    explicit Operation(std::shared_ptr<Ticket> ticket) : ticket(std::move(ticket)) {}
    virtual ~Operation() = default;

    const std::shared_ptr<Ticket> ticket;

    virtual double deadline() const = 0;
    // The ranks that it waits for, and for what.
    virtual std::vector<Awaited> awaited() const = 0;
    // A departed rank without which it can't end, -1 if there is none.
    virtual int missing(const std::set<int>& departed) const = 0;
    virtual std::string name() const = 0;
};

}  // namespace potluck
