// The progress loop: one thread that moves all bytes of one group. The twin of
// engine/loop/progress.py.
//
// Callers post operations and wait for their tickets; this loop owns every link and all state of the
// group, so nothing in it is locked. It knows no Python: what only Python can do (make a link, name
// an error, tell a caller who does not wait) it reports as events, which one Python thread takes
// (engine/loop/native.py). So a main thread that is busy in Python slows down no byte.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/loop/group_state.hpp"
#include "core/tls/link.hpp"
#include "core/loop/mailbox.hpp"
#include "core/loop/messages.hpp"
#include "core/loop/plans.hpp"
#include "core/loop/connections.hpp"

namespace potluck {

struct Event {
    enum class Kind {
        ended,     // operation `id` has ended, and nobody was waiting
        wanted,    // a link to rank `id` is wanted
        let_go,    // link `id` is no longer used
        too_late,  // link `id` came when the group was over
        failed,    // the group is over: see ProgressLoop::failure; `say` is waited for
        over,      // the loop has ended
    };

    Kind kind;
    uint64_t id = 0;
};

// What the loop has to tell, in order. Outlives it.
class Events : public Unclaimed {
public:
    void push(Event event);
    void ended(uint64_t id) override { push({Event::Kind::ended, id}); }

    // All that there is to tell; waits for it at most so long.
    std::vector<Event> take(double seconds);

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Event> events_;
};

struct ProgressSpec {
    Group group;
    uint64_t segment_bytes = 0;
    uint64_t max_early_bytes = 0;
};

class ProgressLoop {
public:
    explicit ProgressLoop(const ProgressSpec& spec);
    ~ProgressLoop();
    ProgressLoop(const ProgressLoop&) = delete;
    ProgressLoop& operator=(const ProgressLoop&) = delete;

    // -- from any thread

    std::shared_ptr<Ticket> ticket(uint64_t id) { return std::make_shared<Ticket>(id, events_); }

    // The memory that these name must stay until the ticket has ended or the loop is over. An
    // operation that can't begin any more ends as refused.
    void start(PlanCall call, std::shared_ptr<Ticket> ticket);
    void send(SendingPtr sending);
    void receive(ReceivingPtr receiving);

    void adopt(Link link);
    // There is no link to `rank` to be had.
    void no_link(int rank);
    // End the group at once, for a reason that the caller knows.
    void stop();
    // Leave in order: what was sent arrives, nothing new begins.
    void close();
    // Wait until the thread has ended.
    void join();

    // The answer to the event `failed`: frames that tell the peers why, none for an orderly end.
    void say(std::vector<uint8_t> abort_body, bool has_abort);

    Events& events() { return *events_; }
    // Why the group is over; only after the event `failed`.
    const GroupFailure& failure() const { return state_.failure(); }
    Counters& counters(int rank) { return *counters_[static_cast<size_t>(rank)]; }

private:
    bool post(std::function<void()> command);
    void run();
    void turn();
    double patience() const;
    bool should_end();
    void begin_close();
    void end();
    void hear_what_to_say();
    void send_abort();
    bool part(Connection& connection);
    const Item* current() const;
    void check_departed();
    bool begins(Ticket& ticket);
    Sink route(Connection& connection, const Frame& frame);
    void handle(Connection& connection, const Frame& frame, const uint8_t* payload);
    Sink discard(Connection& connection, const Frame& frame);

    const ProgressSpec spec_;
    std::shared_ptr<Events> events_;
    GroupState state_;
    std::vector<std::shared_ptr<Counters>> counters_;
    Connections connections_;
    Plans plans_;
    Messages messages_;
    Connection::Route route_;
    Connection::Source source_;
    double closing_ = 0;  // until when peers may still answer, once this rank leaves

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> inbox_;
    bool is_awake_ = false;
    bool is_over_ = false;
    bool has_words_ = false;
    bool has_abort_ = false;
    std::vector<uint8_t> abort_body_;

    std::mutex join_mutex_;
    std::thread thread_;
};

}  // namespace potluck
