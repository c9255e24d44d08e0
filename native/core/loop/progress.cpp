#include "core/loop/progress.hpp"

#include <algorithm>
#include <iterator>
#include <exception>
#include <limits>

#ifdef __linux__
#include <pthread.h>
#endif

#include "core/patience.hpp"

namespace potluck {

namespace {

// How long an orderly close waits for CLOSE_ACK: a stopped or dead peer must not hold it up.
constexpr double close_s = 1.0;
// The longest wait of the poller.
constexpr double idle_s = 5.0;
// How long a failing group tries to send ABORT to its peers before it closes the links.
constexpr double flush_s = 0.2;
// How long it waits for Python to make the ABORT frame: Python's thread may wait for the
// interpreter lock, and may be gone.
constexpr double abort_body_s = 5.0;

std::vector<std::shared_ptr<Counters>> make_counters(int count) {
    std::vector<std::shared_ptr<Counters>> made;
    for (int rank = 0; rank < count; ++rank) made.push_back(std::make_shared<Counters>());
    return made;
}

}  // namespace

// -- events

void EventQueue::push(Event event) {
    {
        const std::lock_guard lock(mutex_);
        events_.push_back(event);
    }
    changed_.notify_one();
}

std::vector<Event> EventQueue::take(double seconds) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                      [this] { return !events_.empty(); });
    return std::exchange(events_, {});
}

// -- from any thread

ProgressLoop::ProgressLoop(const ProgressSpec& spec)
    : spec_(spec),
      events_(std::make_shared<EventQueue>()),
      counters_(make_counters(spec.group.world_size)),
      connections_(
          state_, spec.group,
          // At least three segments of credit: with less a sender would stop after every segment
          // until the CREDIT for it has come (stop-and-wait).
          std::max(spec.max_early_bytes, 3 * (spec.segment_bytes + frame_overhead)), counters_,
          {[this] { return current(); }, [this] { check_departed(); },
           [this](int rank) { plans_.tell_begun(rank); },
           [this](int rank) {
               events_->push({Event::Kind::link_wanted, static_cast<uint64_t>(rank)});
           },
           [this](const AdoptedLink& link) {
               events_->push({Event::Kind::link_released, link.id});
           }}),
      plans_(state_, connections_, spec.group),
      messages_(state_, connections_, spec.segment_bytes),
      route_(
          [this](Connection& connection, const Frame& frame) { return route(connection, frame); }),
      next_outgoing_([this](Connection& connection, Outgoing& outgoing) {
          if (closing_ > 0) return false;
          return messages_.next_outgoing(connection, outgoing) ||
                 plans_.next_outgoing(connection, outgoing);
      }) {
    thread_ = std::thread([this] { run(); });
}

// No answer to `group_failed` can come any more, so the loop must not wait for one.
ProgressLoop::~ProgressLoop() {
    stop();
    {
        const std::lock_guard lock(mutex_);
        has_answer_ = true;
    }
    changed_.notify_all();
    join();
}

// Returns false if the loop has ended. One wake-up per batch: while `is_awake_`, the loop is known
// to take the inbox after its present wait. `turn` resets the flag in the critical section in which
// it takes the inbox, so a command posted after that wakes the poller again, and none is lost.
bool ProgressLoop::post(std::function<void()> command) {
    const std::lock_guard lock(mutex_);
    if (is_over_) return false;
    inbox_.push_back(std::move(command));
    if (!std::exchange(is_awake_, true)) connections_.poller.wake();
    return true;
}

void ProgressLoop::start(PlanArguments arguments, std::shared_ptr<Ticket> ticket) {
    auto running = std::make_shared<RunningPlan>(std::move(arguments), ticket);
    const bool is_posted = post([this, running] {
        if (may_begin(*running->ticket)) plans_.begin(running);
    });
    if (!is_posted) ticket->finish(Ticket::State::refused, 0);
}

void ProgressLoop::send(SendingPtr sending) {
    const bool is_posted = post([this, sending] {
        if (may_begin(*sending->ticket)) messages_.send(sending);
    });
    if (!is_posted) sending->ticket->finish(Ticket::State::refused, 0);
}

void ProgressLoop::receive(ReceivingPtr receiving) {
    const bool is_posted = post([this, receiving] {
        if (may_begin(*receiving->ticket)) messages_.receive(receiving);
    });
    if (!is_posted) receiving->ticket->finish(Ticket::State::refused, 0);
}

void ProgressLoop::leave(uint32_t channel, uint64_t next_sequence) {
    post([this, channel, next_sequence] { plans_.leave(channel, next_sequence); });
}

void ProgressLoop::adopt(AdoptedLink link) {
    // If the group is over, its owner closes the link when the loop has ended.
    post([this, link = std::move(link)] {
        if (state_.is_over()) return;
        const int rank = link.rank;
        connections_.adopt(link);
        // A link that was made while this rank was leaving: its peer needs the CLOSE too.
        if (closing_ > 0) connections_.send_kind(rank, Kind::close);
    });
}

void ProgressLoop::no_link(int rank) {
    post([this, rank] { connections_.lose(rank, GroupFailure::Kind::no_link, ""); });
}

void ProgressLoop::stop() {
    post([this] { state_.fail(GroupFailure::Kind::stopped, -1, "", nullptr); });
}

void ProgressLoop::close() {
    post([this] { begin_close(); });
}

void ProgressLoop::join() {
    const std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
}

void ProgressLoop::set_abort(std::vector<uint8_t> abort_body, bool has_abort) {
    {
        const std::lock_guard lock(mutex_);
        abort_body_ = std::move(abort_body);
        has_abort_ = has_abort;
        has_answer_ = true;
    }
    changed_.notify_all();
}

// -- the loop

void ProgressLoop::run() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "potluck-loop");
#endif
    try {
        while (!should_end()) turn();
    } catch (const std::exception& error) {
        state_.fail(GroupFailure::Kind::broke, spec_.group.rank, error.what(), nullptr);
    }
    end();
}

void ProgressLoop::turn() {
    for (const Poller::Ready& each : connections_.poller.wait(poll_timeout())) {
        if (each.is_readable) connections_.ready.insert(each.tag);
        if (each.is_writable) connections_.on_writable(each.tag);
    }
    std::deque<std::function<void()>> inbox;
    {
        const std::lock_guard lock(mutex_);
        inbox.swap(inbox_);
        is_awake_ = false;
    }
    try {
        for (; !inbox.empty(); inbox.pop_front()) inbox.front()();
    } catch (...) {  // end() runs the commands that are left, so that their tickets end
        const std::lock_guard lock(mutex_);
        std::move(inbox.rbegin(), inbox.rend(), std::front_inserter(inbox_));
        throw;
    }
    connections_.move(route_, next_outgoing_);
    if (closing_ > 0) return;  // operations under way are given up: no deadline matters
    const double now = now_s();
    if (now < held_until_s()) return;
    plans_.check_deadlines(now);
    messages_.check_deadlines(now);
}

// How long the poller may wait: until the next deadline, not at all while links have work left.
double ProgressLoop::poll_timeout() const {
    if (!connections_.ready.empty() || !connections_.dirty.empty()) return 0;
    const double wakes_at = std::min(plans_.wakes_at(), messages_.wakes_at());
    const double until = closing_ > 0 ? closing_ : std::max(wakes_at, held_until_s());
    return std::clamp(until - now_s(), 0.0, idle_s);
}

const Operation* ProgressLoop::current() const {
    if (!plans_.pending().empty()) return plans_.pending().front().get();
    const Operation* first = nullptr;
    messages_.mailbox().each_pending([&](const Operation* operation) {
        if (first == nullptr) first = operation;
    });
    return first;
}

void ProgressLoop::check_departed() {
    if (closing_ > 0) return;  // this rank leaves too: its operations are given up anyway
    for (const auto& running : plans_.pending()) connections_.check_departed(*running);
    messages_.mailbox().each_pending(
        [&](const Operation* operation) { connections_.check_departed(*operation); });
}

// Whether an operation may begin: not if the group is over or being left.
bool ProgressLoop::may_begin(Ticket& ticket) {
    if (!state_.is_over() && closing_ == 0) return true;
    ticket.finish(Ticket::State::refused, 0);
    return false;
}

// -- frames

// Dispatch of an arriving frame. A frame of another group (epoch), or with another sender than the
// link's peer, can only come of a bug or an attack: the link is authenticated.
Sink ProgressLoop::route(Connection& connection, const Frame& frame) {
    if (frame.epoch != spec_.group.epoch) {
        throw ProtocolError("a frame of epoch " + std::to_string(frame.epoch) + " in epoch " +
                            std::to_string(spec_.group.epoch));
    }
    if (frame.source != connection.rank()) {
        throw ProtocolError("a frame of rank " + std::to_string(frame.source) +
                            " on the link to rank " + std::to_string(connection.rank()));
    }
    switch (frame.kind) {
        case Kind::data: return plans_.route(connection, frame);
        case Kind::eager: return messages_.keep_eager(connection, frame);
        case Kind::piece: return messages_.route_piece(connection, frame);
        default: break;
    }
    Sink sink;
    sink.complete = [this, &connection, frame](const uint8_t* payload) {
        handle(connection, frame, payload);
    };
    return sink;
}

void ProgressLoop::handle(Connection& connection, const Frame& frame, const uint8_t* payload) {
    switch (frame.kind) {
        case Kind::rts: messages_.on_rts(connection, frame, payload); break;
        case Kind::cts: messages_.on_cts(connection, frame); break;
        case Kind::hang_query: plans_.on_hang_query(connection, frame); break;
        case Kind::hang_report: plans_.on_hang_report(connection, frame); break;
        case Kind::begun: plans_.on_begun(connection, frame); break;
        case Kind::credit:
            connections_.flow(connection.rank()).add_credit(frame.sequence);
            connections_.dirty.insert(connection.rank());
            break;
        case Kind::abort:
            connection.has_aborted = true;
            state_.fail(GroupFailure::Kind::abort_received, connection.rank(), "", current(),
                        {payload, payload + frame.length});
            break;
        case Kind::close:
            if (connection.has_closed) throw ProtocolError("a second CLOSE");
            connection.has_closed = true;
            // Frames are read in order: all that the peer sent before its CLOSE has been read.
            connections_.send_kind(connection.rank(), Kind::close_ack);
            break;
        case Kind::close_ack: connection.is_acknowledged = true; break;
        default: break;
    }
}

// -- the end

// Begin the close handshake: CLOSE to every peer, which answers CLOSE_ACK. Operations under way
// here are given up. A peer whose operations need this rank raises PeerLost when the link ends; the
// other peers go on without this rank.
void ProgressLoop::begin_close() {
    if (closing_ > 0 || state_.is_over()) return;
    closing_ = now_s() + close_s;
    for (const auto& connection : connections_.all()) {
        if (connection) connections_.send_kind(connection->rank(), Kind::close);
    }
}

bool ProgressLoop::should_end() {
    if (state_.is_over()) return true;
    if (closing_ == 0) return false;
    const auto& connections = connections_.all();
    // CLOSE_ACK means that the peer has read all that was sent to it. Before that a link must not
    // be closed: with bytes unread on either side the system resets the connection, and the peer
    // would lose the last frames of operations that ended well here.
    const bool is_settled =
        std::all_of(connections.begin(), connections.end(), [](const auto& connection) {
            return !connection || (connection->is_acknowledged && !connection->is_writing());
        });
    return is_settled || now_s() >= closing_;
}

// The end of the loop: ABORT to the peers if the group failed, then every ticket is finished, so
// that no caller waits for ever, whatever breaks here.
//
// The order matters. Tickets are finished after send_abort, because a half-written frame is still
// read from a caller's array until then, and a caller may free the array once its ticket has ended.
// The links go last, since their owner may close them then.
void ProgressLoop::end() {
    try {
        if (state_.is_over() && state_.failure().kind != GroupFailure::Kind::closed) {
            events_->push({Event::Kind::group_failed});
            wait_for_abort_body();
            send_abort();
        }
    } catch (const std::exception&) {
        // The links end without ABORT; the peers will raise PeerLost over this rank.
    }
    state_.fail(GroupFailure::Kind::closed, -1, "", nullptr);
    // From here on `post` takes no command. Those in the inbox still run: the group is over, so
    // operations are refused, and links too.
    std::deque<std::function<void()>> inbox;
    {
        const std::lock_guard lock(mutex_);
        is_over_ = true;
        inbox.swap(inbox_);
    }
    for (const auto& command : inbox) command();
    for (const auto& running : plans_.pending()) {
        running->ticket->finish(Ticket::State::failed, now_s() - running->started);
    }
    messages_.mailbox().each_pending(
        [](const Operation* operation) { operation->ticket->finish(Ticket::State::failed, 0); });
    for (const auto& connection : connections_.all()) {
        if (connection) connections_.drop(*connection);
    }
    connections_.poller.close();
    events_->push({Event::Kind::loop_ended});
}

void ProgressLoop::wait_for_abort_body() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(abort_body_s),
                      [this] { return has_answer_; });
}

// Send ABORT to every linked peer, and wait until it was read, at most `flush_s`.
//
// Until this returns the callers' arrays belong to the loop: a half-written frame must be completed
// with the bytes that it began with, because a peer finds the ABORT only behind a whole frame. Each
// link is read until the peer's own ABORT or the link's end: closing it over unread bytes would
// reset the connection, and the peer would lose the reason and blame this rank.
void ProgressLoop::send_abort() {
    if (!has_abort_) return;
    const auto body = std::make_shared<std::vector<uint8_t>>(abort_body_);
    for (const auto& connection : connections_.all()) {
        if (!connection) continue;
        Outgoing outgoing;
        outgoing.frame = connections_.frame(Kind::abort);
        outgoing.frame.length = static_cast<uint32_t>(body->size());
        outgoing.owned = body;
        outgoing.payload = body->data();
        connection->control.clear();  // no other control frame matters, and some could be many
        connection->control.push_back(std::move(outgoing));
    }
    const double deadline = now_s() + flush_s;
    while (!connections_.is_empty()) {
        const double left = deadline - now_s();
        if (left <= 0) break;
        bool has_more = false;
        for (const auto& connection : connections_.all()) {
            if (connection) has_more |= flush_abort(*connection);
        }
        if (!connections_.is_empty()) connections_.poller.wait(has_more ? 0 : left);
    }
}

// Write to the peer and read from it as far as possible; true if there is more to do at once. The
// link is dropped when both sides have sent ABORT, or when the link ends.
bool ProgressLoop::flush_abort(Connection& connection) {
    bool has_more = false;
    try {
        has_more = connection.write([](Connection&, Outgoing&) { return false; });
        if (!connection.has_aborted) {
            has_more |= connection.read([this](Connection& from, const Frame& frame) {
                return discard(from, frame);
            }) || connection.link().stream->is_readable();
        }
    } catch (const LinkError&) {
        connections_.drop(connection);
        return false;
    } catch (const ProtocolError&) {
        connections_.drop(connection);
        return false;
    }
    if (connection.has_aborted && !connection.is_writing()) {
        connections_.drop(connection);
        return false;
    }
    connections_.watch(connection);
    return has_more;
}

// The sink of frames that come once the group is over: their payloads are dropped.
Sink ProgressLoop::discard(Connection& connection, const Frame& frame) {
    if (frame.kind == Kind::abort) connection.has_aborted = true;
    Sink sink;
    sink.consume = [](const uint8_t*, size_t, size_t) {};
    sink.complete = [](const uint8_t*) {};
    return sink;
}

}  // namespace potluck
