// What the loop works on: an operation under way, and the ticket by which its caller waits for it.
#pragma once

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

// (rank, what is missing); rank -1 is any.
using Awaited = std::pair<int, std::string>;

// Tickets that ended while nobody waited for them: somebody must still hear of them.
class Unclaimed {
public:
    virtual ~Unclaimed() = default;
    virtual void ended(uint64_t id) = 0;
};

// How one operation ends, for whoever waits. What Python passes in is this very pointer, so that the
// loop lets it go without the interpreter lock (a pointer to the Python object would need it).
class Ticket : public std::enable_shared_from_this<Ticket> {
public:
    enum class State { running, done, refused, failed };

    Ticket(uint64_t id, std::weak_ptr<Unclaimed> unclaimed)
        : id(id), unclaimed_(std::move(unclaimed)) {}

    const uint64_t id;

    // Block until it has ended or the time is over.
    State wait_for(double seconds);
    State state();
    double seconds();
    int source();

    // A waiter takes it upon itself to tell what became of the operation, or no longer does.
    void claim();
    void unclaim();

    // The operation has ended, after so many seconds; `source` is the rank a message came from.
    // `refused`: it never began, because the group is over or being left. `failed`: the group ended
    // while it was under way.
    void finish(State state, double seconds, int source = -1);

private:
    std::weak_ptr<Unclaimed> unclaimed_;
    std::mutex mutex_;
    std::condition_variable changed_;
    State state_ = State::running;
    double seconds_ = 0;
    int source_ = -1;
    int claims_ = 0;
};

// An operation under way, as far as links and errors are concerned.
class Item {
public:
    explicit Item(std::shared_ptr<Ticket> ticket) : ticket(std::move(ticket)) {}
    virtual ~Item() = default;

    const std::shared_ptr<Ticket> ticket;

    virtual double deadline() const = 0;
    // Whom it waits for, and for what.
    virtual std::vector<Awaited> awaited() const = 0;
    // The rank without which it can't end, if that has departed; else -1.
    virtual int missing(const std::set<int>& departed) const = 0;
    virtual std::string name() const = 0;
};

}  // namespace potluck
