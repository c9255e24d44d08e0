// The progress loop: one event-loop thread that moves all bytes of one group. The twin of
// engine/loop/progress.py.
//
// Callers post operations and wait for their tickets. The loop's thread owns every link and all
// state of the group, so none of that is locked; other threads only post commands to its inbox. The
// loop never takes Python's interpreter lock. What only Python can do (make a link, make an error,
// run a callback) it reports as events, which one Python thread takes (engine/loop/native.py). So
// bytes move while the script computes in Python.
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
        operation_ended,  // operation `id` has ended, and no thread was waiting for its ticket
        link_wanted,      // a link to rank `id` is needed
        link_released,    // link `id` is no longer used: it may be closed
        group_failed,     // see ProgressLoop::failure; the loop waits for `set_abort`
        loop_ended,       // the last event
    };

    Kind kind;
    uint64_t id = 0;
};

// The events of a loop, in order. Shared with the tickets, which may outlive the loop.
class EventQueue : public CompletionListener {
public:
    void push(Event event);
    void ended(uint64_t id) override { push({Event::Kind::operation_ended, id}); }

    // All events that there are; waits for the first one at most `seconds`.
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

    // Post an operation. The loop reads and writes the arrays that it names until its ticket has
    // ended, and the caller must keep them until then. If the group is over or being left, the
    // ticket ends as refused.
    void start(PlanArguments arguments, std::shared_ptr<Ticket> ticket);
    void send(SendingPtr sending);
    void receive(ReceivingPtr receiving);

    // This rank has left a channel, whose next call would be number `next_sequence`.
    void leave(uint32_t channel, uint64_t next_sequence);

    // Use a link; the answer to the event `link_wanted`, or a link that the peer has made.
    void adopt(AdoptedLink link);
    // The other answer: no link to `rank` could be made.
    void no_link(int rank);
    // End the group at once, for a reason that the caller knows.
    void stop();
    // Leave in order: what was sent arrives, nothing new begins.
    void close();
    // Wait until the thread has ended.
    void join();

    // The answer to the event `group_failed`: the payload of the ABORT frames for the peers;
    // without `has_abort` none are sent. Only Python can make it, since it contains the error.
    void set_abort(std::vector<uint8_t> abort_body, bool has_abort);

    EventQueue& events() { return *events_; }
    // Why the group is over; only after the event `group_failed`.
    const GroupFailure& failure() const { return state_.failure(); }
    Counters& counters(int rank) { return *counters_[static_cast<size_t>(rank)]; }

private:
    bool post(std::function<void()> command);
    void run();
    void turn();
    double poll_timeout() const;
    bool should_end();
    void begin_close();
    void end();
    void wait_for_abort_body();
    void send_abort();
    bool flush_abort(Connection& connection);
    const Operation* current() const;
    void check_departed();
    bool may_begin(Ticket& ticket);
    Sink route(Connection& connection, const Frame& frame);
    void handle(Connection& connection, const Frame& frame, const uint8_t* payload);
    Sink discard(Connection& connection, const Frame& frame);

    const ProgressSpec spec_;
    std::shared_ptr<EventQueue> events_;
    GroupState state_;
    std::vector<std::shared_ptr<Counters>> counters_;
    Connections connections_;
    Plans plans_;
    Messages messages_;
    Connection::Route route_;
    Connection::NextOutgoing next_outgoing_;
    double closing_ = 0;  // once this rank leaves: until when peers may still answer; else 0

    // The members up to `abort_body_` are guarded by `mutex_`. All members above belong to the
    // loop's thread, except the event queue and the atomic counters. Neither mutex is held while
    // another is taken.
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> inbox_;  // commands of other threads
    bool is_awake_ = false;                    // the poller was woken for the inbox
    bool is_over_ = false;                     // no command is taken any more
    bool has_answer_ = false;                  // set_abort was called
    bool has_abort_ = false;
    std::vector<uint8_t> abort_body_;

    std::mutex join_mutex_;  // several threads may join
    std::thread thread_;
};

}  // namespace potluck
