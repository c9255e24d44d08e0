#include "core/loop/loop.hpp"

#include <algorithm>
#include <iterator>
#include <exception>
#include <limits>

#ifdef __linux__
#include <pthread.h>
#endif

namespace potluck {

namespace {

// How long an orderly close waits for every peer to have everything.
constexpr double farewell_s = 1.0;
constexpr double idle_s = 5.0;
// How long a failing group tries to tell its peers before it closes the links.
constexpr double flush_s = 0.2;
// How long it waits for Python to find the words.
constexpr double words_s = 5.0;

std::vector<std::shared_ptr<Counters>> make_counters(int count) {
    std::vector<std::shared_ptr<Counters>> made;
    for (int rank = 0; rank < count; ++rank) made.push_back(std::make_shared<Counters>());
    return made;
}

}  // namespace

// -- events

void Events::push(Event event) {
    {
        const std::lock_guard lock(mutex_);
        events_.push_back(event);
    }
    changed_.notify_one();
}

std::vector<Event> Events::take(double seconds) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                      [this] { return !events_.empty(); });
    return std::exchange(events_, {});
}

// -- from any thread

Loop::Loop(const LoopSpec& spec)
    : spec_(spec),
      events_(std::make_shared<Events>()),
      counters_(make_counters(spec.seat.world_size)),
      ports_(fate_, spec.seat,
             // With less than three segments a sender would wait for each report.
             std::max(spec.max_early_bytes, 3 * (spec.segment_bytes + share_overhead)), counters_,
             {[this] { return current(); }, [this] { check_departed(); },
              [this](int rank) { plans_.announce(rank); },
              [this](int rank) {
                  events_->push({Event::Kind::wanted, static_cast<uint64_t>(rank)});
              },
              [this](const Link& link) { events_->push({Event::Kind::let_go, link.id}); }}),
      plans_(fate_, ports_, spec.seat),
      messages_(fate_, ports_, spec.segment_bytes),
      route_([this](Port& port, const Frame& frame) { return route(port, frame); }),
      source_([this](Port& port, Outgoing& outgoing) {
          if (closing_ > 0) return false;
          return messages_.next_outgoing(port, outgoing) || plans_.next_outgoing(port, outgoing);
      }) {
    thread_ = std::thread([this] { run(); });
}

Loop::~Loop() {
    stop();
    {
        const std::lock_guard lock(mutex_);
        has_words_ = true;
    }
    changed_.notify_all();
    join();
}

bool Loop::post(std::function<void()> command) {
    const std::lock_guard lock(mutex_);
    if (is_over_) return false;
    inbox_.push_back(std::move(command));
    if (!std::exchange(is_awake_, true)) ports_.poller.wake();
    return true;
}

void Loop::start(PlanSpec spec, std::shared_ptr<Ticket> ticket) {
    auto running = std::make_shared<RunningPlan>(std::move(spec), ticket);
    const bool is_posted = post([this, running] {
        if (begins(*running->ticket)) plans_.begin(running);
    });
    if (!is_posted) ticket->finish(Ticket::State::refused, 0);
}

void Loop::send(SendingPtr sending) {
    const bool is_posted = post([this, sending] {
        if (begins(*sending->ticket)) messages_.send(sending);
    });
    if (!is_posted) sending->ticket->finish(Ticket::State::refused, 0);
}

void Loop::receive(ReceivingPtr receiving) {
    const bool is_posted = post([this, receiving] {
        if (begins(*receiving->ticket)) messages_.receive(receiving);
    });
    if (!is_posted) receiving->ticket->finish(Ticket::State::refused, 0);
}

void Loop::adopt(Link link) {
    const uint64_t id = link.id;
    const bool is_posted = post([this, link = std::move(link)] {
        if (fate_.is_over()) {
            events_->push({Event::Kind::too_late, link.id});
            return;
        }
        const int rank = link.rank;
        ports_.adopt(link);
        // It came while this rank was leaving: say so in order.
        if (closing_ > 0) ports_.say(rank, Kind::goodbye);
    });
    if (!is_posted) events_->push({Event::Kind::too_late, id});
}

void Loop::no_link(int rank) {
    post([this, rank] { ports_.lose(rank, Fact::Kind::no_link, ""); });
}

void Loop::stop() {
    post([this] { fate_.fail(Fact::Kind::stopped, -1, "", nullptr); });
}

void Loop::close() {
    post([this] { begin_close(); });
}

void Loop::join() {
    const std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
}

void Loop::say(std::vector<uint8_t> abort_body, bool has_abort) {
    {
        const std::lock_guard lock(mutex_);
        abort_body_ = std::move(abort_body);
        has_abort_ = has_abort;
        has_words_ = true;
    }
    changed_.notify_all();
}

// -- the loop

void Loop::run() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "potluck-loop");
#endif
    try {
        while (!should_end()) turn();
    } catch (const std::exception& error) {
        fate_.fail(Fact::Kind::broke, spec_.seat.rank, error.what(), nullptr);
    }
    end();
}

void Loop::turn() {
    for (const Poller::Ready& each : ports_.poller.wait(patience())) {
        if (each.has_bytes) ports_.ready.insert(each.tag);
        if (each.has_room) ports_.has_room(each.tag);
    }
    std::deque<std::function<void()>> inbox;
    {
        const std::lock_guard lock(mutex_);
        inbox.swap(inbox_);
        is_awake_ = false;
    }
    try {
        for (; !inbox.empty(); inbox.pop_front()) inbox.front()();
    } catch (...) {  // end() finds what has not begun, and lets go who waits for it
        const std::lock_guard lock(mutex_);
        std::move(inbox.rbegin(), inbox.rend(), std::front_inserter(inbox_));
        throw;
    }
    ports_.move(route_, source_);
    if (closing_ > 0) return;  // what is under way is given up
    const double now = now_s();
    plans_.check_deadlines(now);
    messages_.check_deadlines(now);
}

// How long there is nothing to do unless something comes.
double Loop::patience() const {
    if (!ports_.ready.empty() || !ports_.dirty.empty()) return 0;
    const double until =
        closing_ > 0 ? closing_ : std::min(plans_.wakes_at(), messages_.wakes_at());
    return std::clamp(until - now_s(), 0.0, idle_s);
}

const Item* Loop::current() const {
    if (!plans_.pending().empty()) return plans_.pending().front().get();
    const Item* first = nullptr;
    messages_.mailbox().each_pending([&](const Item* item) {
        if (first == nullptr) first = item;
    });
    return first;
}

void Loop::check_departed() {
    if (closing_ > 0) return;  // what is under way is given up: who leaves has lost nobody
    for (const auto& running : plans_.pending()) ports_.check_departed(*running);
    messages_.mailbox().each_pending([&](const Item* item) { ports_.check_departed(*item); });
}

// Whether an operation may begin: not if the group is over or being left.
bool Loop::begins(Ticket& ticket) {
    if (!fate_.is_over() && closing_ == 0) return true;
    ticket.finish(Ticket::State::refused, 0);
    return false;
}

// -- frames

// Where the payload of an arriving frame goes, and what is done once it is there.
Sink Loop::route(Port& port, const Frame& frame) {
    if (frame.epoch != spec_.seat.epoch) {
        throw ProtocolError("a frame of epoch " + std::to_string(frame.epoch) + " in epoch " +
                            std::to_string(spec_.seat.epoch));
    }
    if (frame.source != port.rank()) {
        throw ProtocolError("a frame of rank " + std::to_string(frame.source) +
                            " on the link to rank " + std::to_string(port.rank()));
    }
    switch (frame.kind) {
        case Kind::data: return plans_.route(port, frame);
        case Kind::eager: return messages_.keep_eager(port, frame);
        case Kind::piece: return messages_.route_piece(port, frame);
        default: break;
    }
    Sink sink;
    sink.complete = [this, &port, frame](const uint8_t* payload) { handle(port, frame, payload); };
    return sink;
}

void Loop::handle(Port& port, const Frame& frame, const uint8_t* payload) {
    switch (frame.kind) {
        case Kind::request: messages_.on_request(port, frame, payload); break;
        case Kind::grant: messages_.on_grant(port, frame); break;
        case Kind::ask: plans_.on_ask(port, frame); break;
        case Kind::tell: plans_.on_tell(port, frame); break;
        case Kind::begun: plans_.on_begun(port, frame); break;
        case Kind::used:
            ports_.share(port.rank()).reported(frame.operation);
            ports_.dirty.insert(port.rank());
            break;
        case Kind::abort:
            port.said_abort = true;
            fate_.fail(Fact::Kind::told, port.rank(), "", current(),
                       {payload, payload + frame.length});
            break;
        case Kind::goodbye:
            if (port.said_goodbye) throw ProtocolError("a second GOODBYE");
            port.said_goodbye = true;
            ports_.say(port.rank(), Kind::farewell);
            break;
        case Kind::farewell: port.is_acknowledged = true; break;
        default: break;
    }
}

// -- the end

// Say goodbye. What is under way here is given up: who needs this rank for it is told, who does not
// may go on.
void Loop::begin_close() {
    if (closing_ > 0 || fate_.is_over()) return;
    closing_ = now_s() + farewell_s;
    for (const auto& port : ports_.all()) {
        if (port) ports_.say(port->rank(), Kind::goodbye);
    }
}

bool Loop::should_end() {
    if (fate_.is_over()) return true;
    if (closing_ == 0) return false;
    const auto& ports = ports_.all();
    const bool is_settled = std::all_of(ports.begin(), ports.end(), [](const auto& port) {
        return !port || (port->is_acknowledged && !port->is_writing());
    });
    return is_settled || now_s() >= closing_;
}

// Tell the peers, then let every waiting caller go: whatever breaks here, nobody hangs.
void Loop::end() {
    try {
        if (fate_.is_over() && fate_.fact().kind != Fact::Kind::closed) {
            events_->push({Event::Kind::failed});
            hear_what_to_say();
            tell_all();
        }
    } catch (const std::exception&) {
        // The links end now, which tells the peers as much.
    }
    fate_.fail(Fact::Kind::closed, -1, "", nullptr);
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
        [](const Item* item) { item->ticket->finish(Ticket::State::failed, 0); });
    for (const auto& port : ports_.all()) {
        if (port) ports_.drop(*port);
    }
    ports_.poller.close();
    events_->push({Event::Kind::over});
}

void Loop::hear_what_to_say() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(words_s), [this] { return has_words_; });
}

// Tell every linked peer why the group is over, within a bound.
//
// Until this returns user buffers are still ours, so frames half written stay what they were. Each
// link is read until the peer's own ABORT or its end: closing it over unread bytes would reset the
// connection, and the peer would lose the reason and blame this rank.
void Loop::tell_all() {
    if (!has_abort_) return;
    const auto body = std::make_shared<std::vector<uint8_t>>(abort_body_);
    for (const auto& port : ports_.all()) {
        if (!port) continue;
        Outgoing outgoing;
        outgoing.frame = ports_.frame(Kind::abort);
        outgoing.frame.length = static_cast<uint32_t>(body->size());
        outgoing.owned = body;
        outgoing.payload = body->data();
        port->control.clear();
        port->control.push_back(std::move(outgoing));
    }
    const double deadline = now_s() + flush_s;
    while (!ports_.is_empty()) {
        const double left = deadline - now_s();
        if (left <= 0) break;
        bool has_more = false;
        for (const auto& port : ports_.all()) {
            if (port) has_more |= part(*port);
        }
        if (!ports_.is_empty()) ports_.poller.wait(has_more ? 0 : left);
    }
}

// Go on with telling the peer and hearing it; true if there is more to do at once.
bool Loop::part(Port& port) {
    bool has_more = false;
    try {
        has_more = port.write([](Port&, Outgoing&) { return false; });
        if (port.is_garbled) {
            has_more |= port.drain();
        } else if (!port.said_abort) {
            has_more |= port.read([this](Port& from, const Frame& frame) {
                return discard(from, frame);
            }) || port.link().stream->is_readable();
        }
    } catch (const LinkError&) {
        ports_.drop(port);
        return false;
    } catch (const ProtocolError&) {
        ports_.drop(port);
        return false;
    }
    if (port.said_abort && !port.is_writing()) {
        ports_.drop(port);
        return false;
    }
    ports_.watch(port);
    return has_more;
}

// Where a frame goes once the group is over.
Sink Loop::discard(Port& port, const Frame& frame) {
    if (frame.kind == Kind::abort) port.said_abort = true;
    Sink sink;
    sink.consume = [](const uint8_t*, size_t, size_t) {};
    sink.complete = [](const uint8_t*) {};
    return sink;
}

}  // namespace potluck
