#include "core/loop/plans.hpp"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

namespace potluck {

namespace {

// The most frames that may wait for a peer that sends queries and reads no reports, and the most
// queries about calls not made here that are kept: bounds on what a hostile peer can make grow.
constexpr size_t max_unread = 1024;
// Ended calls kept per channel, so that a late frame of another call can be reported as Desync.
constexpr size_t num_remembered = 16;
// Channels that this rank has left and still knows, for queries and frames of peers that lag.
constexpr size_t num_left = 256;

}  // namespace

void Plans::begin(RunningPtr running) {
    running->started = now_s();
    running_.push_back(running);
    by_key_[running->key] = std::prev(running_.end());
    const auto left = left_.find(running->spec.channel);
    // A call below this number was made before the channel was left.
    if (left != left_.end() && running->sequence >= left->second) left_.erase(left);
    next_sequence_[running->spec.channel] = running->sequence + 1;
    connections_.need(running->send_peers());
    connections_.need(running->receive_peers());
    const auto kept = early_.find(running->key);
    if (kept != early_.end()) {
        auto queues = std::move(kept->second);
        early_.erase(kept);
        // Frames of this call that came before the call: compared now, applied by `advance` as the
        // plan allows. Their credit returns, since a plan bounds what may still come for it.
        for (auto& [peer, queue] : queues) {
            for (EarlyFrame& each : queue) {
                connections_.release(peer, each.frame.length);
                if (!keep_waiting(*running, peer, std::move(each))) return;
            }
        }
    }
    const auto queried = queries_.find(running->key);
    if (queried != queries_.end()) {
        const auto fingerprints = std::move(queried->second);
        queries_.erase(queried);
        for (const auto& [peer, fingerprint] : fingerprints) {
            if (fingerprint != running->spec.fingerprint) {
                fail_desync(peer, *running, fingerprint);
                return;
            }
        }
    }
    advance(running);
    // Only after the early frames were applied: a peer may have sent all of its part and left.
    if (!connections_.departed.empty() && by_key_.count(running->key))
        connections_.check_departed(*running);
    for (int peer : running->receive_peers()) tell_begun(peer);
}

Plans::RunningPtr Plans::find(const Key& key) const {
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? nullptr : *found->second;
}

// -- channels that this rank has left

void Plans::leave(uint32_t channel, uint64_t next_sequence) {
    left_[channel] = next_sequence;
    left_order_.push_back(channel);
    if (left_order_.size() > num_left) {
        left_.erase(left_order_.front());
        left_order_.pop_front();
    }
    if (!is_running(channel)) forget(channel);
}

bool Plans::is_running(uint32_t channel) const {
    const auto first = by_key_.lower_bound({channel, 0});
    return first != by_key_.end() && first->first.first == channel;
}

void Plans::forget(uint32_t channel) {
    next_sequence_.erase(channel);
    ended_.erase(channel);
    for (int rank = 0; rank < group_.world_size; ++rank) connections_.flow(rank).forget(channel);
}

// Whether this rank has made the call that `frame` names.
bool Plans::was_called(const Frame& frame) const {
    for (const auto* known : {&next_sequence_, &left_}) {
        const auto next = known->find(frame.channel);
        if (next != known->end() && frame.sequence < next->second) return true;
    }
    return false;
}

// `peer` has begun the call of `frame`, which is of no use if this rank has made it and left.
void Plans::note_begun(int peer, const Frame& frame) {
    const auto left = left_.find(frame.channel);
    if (left != left_.end() && frame.sequence < left->second && !is_running(frame.channel)) return;
    connections_.flow(peer).has_begun(frame.channel, frame.sequence);
}

// -- deadlines

// The first operation of each channel. Later operations of the channel may only be waiting for it,
// so they are not queried.
std::vector<RunningPlan*> Plans::oldest() const {
    std::vector<RunningPlan*> first;
    std::set<uint32_t> channels;
    for (const RunningPtr& running : running_) {
        if (channels.insert(running->spec.channel).second) first.push_back(running.get());
    }
    return first;
}

// The operation whose deadline comes next; an overdue one that was queried comes first.
RunningPlan* Plans::next_overdue() const {
    RunningPlan* next = nullptr;
    for (const RunningPtr& running : running_) {
        if (next == nullptr || std::tuple(!running->is_overdue, running->deadline()) <
                                   std::tuple(!next->is_overdue, next->deadline())) {
            next = running.get();
        }
    }
    return next;
}

void Plans::check_deadlines(double now) {
    if (running_.empty()) return;
    for (RunningPlan* running : oldest()) {
        if (running->has_queried || now < running->started + stall_s) continue;
        running->has_queried = true;
        std::vector<int> peers;
        for (const auto& [peer, what] : running->awaited()) peers.push_back(peer);
        query(*running, peers, false);
    }
    RunningPlan* late = next_overdue();
    if (late != nullptr && now >= late->deadline()) diagnose(*late, now);
}

double Plans::wakes_at() const {
    double soonest = std::numeric_limits<double>::infinity();
    if (running_.empty()) return soonest;
    for (const RunningPlan* running : oldest()) {
        if (!running->has_queried) soonest = std::min(soonest, running->started + stall_s);
    }
    return std::min(soonest, next_overdue()->deadline());
}

// -- segments out

bool Plans::next_outgoing(Connection& connection, Outgoing& outgoing) {
    if (state_.is_over()) return false;
    const int peer = connection.rank();
    FlowControl& flow = connections_.flow(peer);
    // The oldest operation first, so that it ends first. An operation that can send nothing on this
    // link now does not hold up the later ones (rule 3).
    for (const RunningPtr& running : running_) {
        Segment segment;
        if (!running->next_send(peer, segment) || !connection.can_start(segment.wire_bytes))
            continue;
        const uint32_t nbytes = segment.wire_bytes;
        if (!flow.may_send(running->spec.channel, running->sequence, nbytes)) continue;
        if (must_wait(*running, peer)) continue;
        flow.sent(nbytes);
        running->issue(peer, segment);
        outgoing.frame =
            connections_.frame(Kind::data, running->spec.channel, running->sequence);
        outgoing.frame.chunk = running->spec.chunks[segment.chunk].number;
        outgoing.frame.segment = segment.number;
        outgoing.frame.length = nbytes;
        outgoing.frame.fingerprint = running->spec.fingerprint;
        outgoing.frame.dtype = static_cast<uint8_t>(running->spec.dtype);
        outgoing.owned = running->encoded(segment);
        outgoing.payload = outgoing.owned ? outgoing.owned->data() : segment.data;
        outgoing.sent = [this, running, segment] { sent(running, segment); };
        return true;
    }
    return false;
}

// Flow balancing. A rank's links share one network interface. If one link runs ahead, the slowest
// is left alone at the end, and one link alone can't fill the wire. So a link that is more than one
// segment ahead of a *blocked* link pauses until that link has room. Only blocked links count: a
// link that merely has nothing to send yet must not hold up the others (rule 3). No deadlock: a
// blocked link waits only for its peer to read, never for this rank's other links; the paused
// links are woken in Connections::write.
bool Plans::must_wait(const RunningPlan& running, int peer) {
    for (int other : running.send_peers()) {
        const Connection* connection = connections_.find(other);
        if (connection != nullptr && connection->is_blocked && running.is_ahead(peer, other)) {
            connections_.paused.insert(peer);
            return true;
        }
    }
    return false;
}

void Plans::sent(const RunningPtr& running, const Segment& segment) {
    running->sent(segment);
    advance(running);
}

// Apply early frames that have become due; mark the links that may have something to send; end the
// operation if it is complete.
void Plans::advance(const RunningPtr& running) {
    // Until nothing moves: a frame of one peer may be what a frame of another has waited for.
    bool has_moved = true;
    while (has_moved && !running->early.empty() && !state_.is_over()) {
        has_moved = false;
        std::vector<int> peers;  // a copy: apply_early erases entries
        for (const auto& [peer, queue] : running->early) peers.push_back(peer);
        for (int peer : peers) has_moved |= apply_early(*running, peer);
    }
    connections_.dirty.insert(running->send_peers().begin(), running->send_peers().end());
    if (!running->is_complete()) return;
    const auto found = by_key_.find(running->key);
    if (found == by_key_.end()) return;
    const RunningPtr last = running;  // `running` may refer to the list's element, erased next
    running_.erase(found->second);
    by_key_.erase(found);
    const uint32_t channel = last->spec.channel;
    auto& ended = ended_[channel];
    ended.push_back({last->sequence, last->spec.fingerprint, last->spec.call});
    if (ended.size() > num_remembered) ended.pop_front();
    if (left_.count(channel) && !is_running(channel)) forget(channel);
    last->conclude();
    last->ticket->finish(Ticket::State::done, now_s() - last->started);
}

// -- segments in

Sink Plans::route(Connection& connection, const Frame& frame) {
    const int peer = connection.rank();
    // A peer that sends frames of a call has begun it, so frames of that call need no credit.
    note_begun(peer, frame);
    const RunningPtr running = find({frame.channel, frame.sequence});
    if (running == nullptr) {
        const auto next = next_sequence_.find(frame.channel);
        if (next != next_sequence_.end() && frame.sequence < next->second) on_late(peer, frame);
        connections_.hold(peer, frame.length);
        return keep(frame, &Plans::on_early, peer);
    }
    // Credit returns at once for a call that has begun, even if the segment's memory is not ready:
    // the plan bounds what can still come for the call, so credit need not, and the sender does not
    // stop for it.
    connections_.consume(peer, frame.length);
    Segment segment;
    if (!is_expected(*running, peer, frame, segment) || running->early.count(peer) ||
        !running->is_ready(segment)) {
        return keep(frame, &Plans::on_waiting, peer);
    }
    Sink sink;
    if (running->is_coded(segment)) {
        sink.complete = [this, running, segment, peer](const uint8_t* payload) {
            running->arrived(peer, segment);
            running->apply(segment, payload, 0, segment.wire_bytes);
            running->applied(segment);
            advance(running);
        };
        return sink;
    }
    if (running->combines(segment)) {
        sink.consume = [running, segment](const uint8_t* part, size_t offset, size_t count) {
            running->apply(segment, part, offset, count);
        };
    } else {
        sink.buffer = segment.data;
    }
    sink.complete = [this, running, segment, peer](const uint8_t*) {
        running->arrived(peer, segment);
        running->applied(segment);
        advance(running);
    };
    return sink;
}

// The sink of a frame that can't be applied when its header comes: memory of its own. What is done
// with it is decided when its payload is complete, since the operation may have begun, or a step
// may have ended, meanwhile.
Sink Plans::keep(const Frame& frame, void (Plans::*then)(int, EarlyFrame), int peer) {
    const auto kept = std::make_shared<EarlyFrame>();
    kept->frame = frame;
    kept->payload.reset(new uint8_t[std::max<size_t>(1, frame.length)]);
    Sink sink;
    sink.buffer = kept->payload.get();
    sink.complete = [this, then, peer, kept](const uint8_t*) {
        (this->*then)(peer, std::move(*kept));
    };
    return sink;
}

// A frame has been read whose operation had not begun when its header came.
void Plans::on_early(int peer, EarlyFrame kept) {
    const Key key(kept.frame.channel, kept.frame.sequence);
    if (!by_key_.count(key)) {
        early_[key][peer].push_back(std::move(kept));
        return;
    }
    connections_.release(peer, kept.frame.length);
    on_waiting(peer, std::move(kept));
}

// A frame has been read whose memory was not ready when its header came.
void Plans::on_waiting(int peer, EarlyFrame kept) {
    const RunningPtr running = find({kept.frame.channel, kept.frame.sequence});
    if (running == nullptr) {
        on_late(peer, kept.frame);
    } else if (keep_waiting(*running, peer, std::move(kept))) {
        advance(running);
    }
}

// Keep a frame until the plan comes to it; false (and a failed group) if it never will. Only the
// frame that the plan receives next from this peer is kept, so all that a peer can make this rank
// keep for a call is what the plan receives from it.
bool Plans::keep_waiting(RunningPlan& running, int peer, EarlyFrame kept) {
    Segment segment;
    if (!is_expected(running, peer, kept.frame, segment)) return false;
    running.arrived(peer, segment);
    running.early[peer].push_back({segment, std::move(kept.payload)});
    return true;
}

bool Plans::apply_early(RunningPlan& running, int peer) {
    auto& queue = running.early[peer];
    bool has_moved = false;
    while (!queue.empty() && running.is_ready(queue.front().segment)) {
        const EarlySegment early = std::move(queue.front());
        queue.pop_front();
        running.apply(early.segment, early.payload.get(), 0, early.segment.wire_bytes);
        running.applied(early.segment);
        has_moved = true;
    }
    if (queue.empty()) running.early.erase(peer);
    return has_moved;
}

// Whether `frame` is the next one that the plan receives from `peer`, which is then `segment`; false
// (and a failed group) if it is another one. Every field is compared with what the plan says, so the
// length and place of a write into the user's array never come from the peer.
bool Plans::is_expected(const RunningPlan& running, int peer, const Frame& frame,
                        Segment& segment) {
    if (frame.fingerprint != running.spec.fingerprint) {
        fail_desync(peer, running, frame.fingerprint);
        return false;
    }
    if (!running.next_receive(peer, segment) ||
        frame.chunk != running.spec.chunks[segment.chunk].number ||
        frame.segment != segment.number || frame.length != segment.wire_bytes ||
        frame.dtype != static_cast<uint8_t>(running.spec.dtype)) {
        // Equal fingerprints, so equal calls: the peer's engine is broken, not its script.
        connections_.violated(peer, "it sent segment " + std::to_string(frame.segment) +
                                        " of chunk " + std::to_string(frame.chunk) +
                                        ", which is not due");
        return false;
    }
    return true;
}

void Plans::tell_begun(int peer) {
    if (connections_.find(peer) == nullptr || !connections_.flow(peer).is_filling()) return;
    for (const RunningPtr& running : running_) {
        const auto& peers = running->receive_peers();
        if (std::find(peers.begin(), peers.end(), peer) == peers.end()) continue;
        if (!running->told_begun.insert(peer).second) continue;
        Outgoing outgoing;
        outgoing.frame =
            connections_.frame(Kind::begun, running->spec.channel, running->sequence);
        connections_.send_control(peer, std::move(outgoing));
    }
}

void Plans::on_begun(Connection& connection, const Frame& frame) {
    note_begun(connection.rank(), frame);
    connections_.dirty.insert(connection.rank());  // frames of that call may go now
}

// -- disagreements

// A frame of an operation that has ended here: the peer must have made another call.
void Plans::on_late(int peer, const Frame& frame) {
    if (disagrees(peer, frame)) return;
    throw ProtocolError("a frame of operation #" + std::to_string(frame.sequence) +
                        ", which has ended");
}

// Whether `frame` belongs to another call than the one that this rank made under that number. If
// so, the group has failed.
bool Plans::disagrees(int peer, const Frame& frame) {
    if (const RunningPtr running = find({frame.channel, frame.sequence})) {
        if (running->spec.fingerprint == frame.fingerprint) return false;
        fail_desync(peer, *running, frame.fingerprint);
        return true;
    }
    const auto ended = ended_.find(frame.channel);
    if (ended == ended_.end()) return false;
    for (const Ended& each : ended->second) {
        if (each.sequence != frame.sequence || each.fingerprint == frame.fingerprint) continue;
        struct Past : Operation {  // only its name is needed, for the error
            explicit Past(std::string name) : Operation(nullptr), text(std::move(name)) {}
            std::string text;
            double deadline() const override { return 0; }
            std::vector<Awaited> awaited() const override { return {}; }
            int missing(const std::set<int>&) const override { return -1; }
            std::string name() const override { return text; }
        };
        const Past past(each.call + " #" + std::to_string(each.sequence));
        state_.disagree(GroupFailure::Kind::desync, peer, past, frame.fingerprint);
        return true;
    }
    return false;
}

void Plans::fail_desync(int peer, const RunningPlan& running, uint64_t theirs) {
    state_.disagree(GroupFailure::Kind::desync, peer, running, theirs);
}

// -- operations that do not end

void Plans::query(const RunningPlan& running, const std::vector<int>& peers, bool pass_on) {
    Frame frame = connections_.frame(Kind::hang_query, running.spec.channel, running.sequence);
    frame.segment = pass_on ? 1 : 0;
    frame.fingerprint = running.spec.fingerprint;
    for (int peer : std::set<int>(peers.begin(), peers.end())) {
        if (connections_.find(peer) == nullptr) continue;
        Outgoing outgoing;
        outgoing.frame = frame;
        connections_.send_control(peer, std::move(outgoing));
    }
}

// `running` is overdue: find the blocking rank, and end the group with its name.
void Plans::diagnose(RunningPlan& running, double now) {
    const HangCheck& check = *hangs_.open(running.key).first;
    const bool is_first = !running.is_overdue;
    running.is_overdue = true;
    std::vector<int> others, awaited;
    for (int rank : running.spec.ranks) {
        if (rank != group_.rank) others.push_back(rank);
    }
    for (const auto& [peer, what] : running.awaited()) awaited.push_back(peer);
    const bool is_final = now >= running.deadline() && !is_first;
    const int blocking_rank = check.blocking_rank(others, awaited, is_final);
    const bool has_all =
        std::all_of(others.begin(), others.end(), [&](int rank) { return check.has_report(rank); });
    // The first time no rank has been asked yet: ask, and move the deadline by the time for
    // answers. From then on the group ends with the first report of a rank that has not made the
    // call; or once every rank has reported that it has (all are in the call, and slow); or at the
    // moved deadline, and then a silent rank is to blame.
    if (blocking_rank < 0 && is_first) {
        running.set_deadline(now + answer_s);
        query(running, others, true);
    } else if (blocking_rank >= 0 || now >= running.deadline() || has_all) {
        state_.fail(GroupFailure::Kind::overdue, blocking_rank, "", &running);
    }
}

void Plans::on_hang_query(Connection& connection, const Frame& frame) {
    const int peer = connection.rank();
    if (disagrees(peer, frame)) return;
    const Key key(frame.channel, frame.sequence);
    const RunningPtr running = find(key);
    const bool has_called = was_called(frame);
    // The peer's call only stalls. `disagrees` has compared it with this rank's call; if this rank
    // has not made it yet, the fingerprint is kept for `begin`. No answer is sent.
    if (frame.segment == 0) {
        if (!has_called && (queries_.count(key) || queries_.size() < max_unread)) {
            queries_[key][peer] = frame.fingerprint;
        }
        return;
    }
    if (connection.control.size() >= max_unread) {
        throw ProtocolError("it sends hang queries and reads no report (" +
                            std::to_string(connection.control.size()) + " wait)");
    }
    const auto [check, is_new] = hangs_.open(key);
    report(peer, key, group_.rank, has_called);
    // Reports of other ranks that have come already: the peer may have no link to those ranks.
    for (const auto& [rank, called] : check->reports) report(peer, key, rank, called);
    check->askers.insert(peer);
    // A query is passed on once for each operation, or queries would circle among the ranks for
    // ever.
    if (is_new && running != nullptr) {
        std::vector<int> others;
        for (int rank : running->spec.ranks) {
            if (rank != group_.rank && rank != peer) others.push_back(rank);
        }
        query(*running, others, true);
    }
}

void Plans::on_hang_report(Connection& connection, const Frame& frame) {
    const Key key(frame.channel, frame.sequence);
    HangCheck* check = hangs_.get(key);
    if (check == nullptr || frame.chunk >= static_cast<uint32_t>(group_.world_size)) return;
    const int rank = static_cast<int>(frame.chunk);
    if (rank == group_.rank || check->has_report(rank)) return;
    const bool has_called = frame.segment != 0;
    // The first report about a rank counts. It is passed on to all askers but the one that sent it,
    // so each report crosses a link at most once in each direction, and the exchange ends.
    check->reports.emplace_back(rank, has_called);
    for (int asker : check->askers) {
        if (asker != connection.rank()) report(asker, key, rank, has_called);
    }
    const RunningPtr running = find(key);
    if (running != nullptr && running->is_overdue) diagnose(*running, now_s());
}

void Plans::report(int peer, const Key& key, int rank, bool has_called) {
    if (connections_.find(peer) == nullptr) return;
    Outgoing outgoing;
    outgoing.frame = connections_.frame(Kind::hang_report, key.first, key.second);
    outgoing.frame.chunk = static_cast<uint32_t>(rank);
    outgoing.frame.segment = has_called ? 1 : 0;
    connections_.send_control(peer, std::move(outgoing));
}

}  // namespace potluck
