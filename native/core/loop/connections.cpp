#include "core/loop/connections.hpp"

#include <utility>

namespace potluck {

Connections::Connections(GroupState& state, Group group, uint64_t max_early_bytes,
                         std::vector<std::shared_ptr<Counters>> counters, Hooks hooks)
    : state_(state),
      group_(group),
      hooks_(std::move(hooks)),
      counters_(std::move(counters)),
      by_rank_(static_cast<size_t>(group.world_size)),
      watched_(static_cast<size_t>(group.world_size)),
      flows_(static_cast<size_t>(group.world_size), FlowControl(max_early_bytes)) {}

// -- links

void Connections::adopt(AdoptedLink link) {
    const int rank = link.rank;
    if (find(rank) != nullptr || departed.count(rank)) {
        hooks_.released(link);
        return;
    }
    auto& connection = by_rank_[static_cast<size_t>(rank)];
    connection =
        std::make_unique<Connection>(std::move(link), counters_[static_cast<size_t>(rank)]);
    ++num_connections_;
    const auto waiting = unsent_.find(rank);
    if (waiting != unsent_.end()) {
        connection->control = std::move(waiting->second);
        unsent_.erase(waiting);
    }
    watch(*connection);
    ready.insert(rank);
}

void Connections::need(const std::vector<int>& ranks) {
    for (int rank : ranks) {
        if (find(rank) == nullptr && !departed.count(rank)) hooks_.request(rank);
    }
}

// The poller must forget the descriptor before its owner can close it: the number may belong to
// another link the moment after.
void Connections::drop(Connection& connection) {
    const auto rank = static_cast<size_t>(connection.rank());
    if (watched_[rank] != 0) poller.forget(connection.link().stream->fd());
    watched_[rank] = 0;
    --num_connections_;
    const std::unique_ptr<Connection> last = std::move(by_rank_[rank]);
    hooks_.released(last->link());
}

void Connections::watch(Connection& connection) {
    int& before = watched_[static_cast<size_t>(connection.rank())];
    const int wanted = connection.is_blocked ? 2 : 1;
    if (before == wanted) return;
    poller.watch(connection.link().stream->fd(), connection.rank(), connection.is_blocked,
                 before == 0);
    before = wanted;
}

// -- bytes

// Reads come before writes: what is read may make segments ready to be sent. The sets are exchanged
// for empty ones, since `read` and `write` add ranks for the next turn.
void Connections::move(const Connection::Route& route,
                       const Connection::NextOutgoing& next_outgoing) {
    for (int rank : std::exchange(ready, {})) {
        if (Connection* connection = find(rank)) {
            read(*connection, route);
            dirty.insert(rank);
        }
    }
    for (int rank : std::exchange(dirty, {})) {
        Connection* connection = find(rank);
        // The poller tells when a blocked link is writable; until then a write is a system call in
        // vain.
        if (connection != nullptr && (connection->is_writable || !connection->is_blocked))
            write(*connection, next_outgoing, route);
    }
}

void Connections::on_writable(int rank) {
    if (Connection* connection = find(rank)) {
        connection->is_writable = true;
        dirty.insert(rank);
    }
}

void Connections::send_control(int peer, Outgoing outgoing) {
    if (Connection* connection = find(peer)) {
        connection->control.push_back(std::move(outgoing));
        dirty.insert(peer);
        return;
    }
    hooks_.request(peer);
    unsent_[peer].push_back(std::move(outgoing));
}

void Connections::send_kind(int peer, Kind kind) {
    Outgoing outgoing;
    outgoing.frame = frame(kind);
    send_control(peer, std::move(outgoing));
}

Frame Connections::frame(Kind kind, uint32_t channel, uint64_t sequence) const {
    Frame made;
    made.kind = kind;
    made.epoch = group_.epoch;
    made.source = static_cast<uint16_t>(group_.rank);
    made.channel = channel;
    made.sequence = sequence;
    return made;
}

void Connections::read(Connection& connection, const Connection::Route& route) {
    try {
        // Bytes in the TLS buffer do not make the descriptor readable: the poller would not tell.
        if (connection.read(route) || connection.link().stream->is_readable())
            ready.insert(connection.rank());
    } catch (const LinkError& error) {
        on_end(connection, error.what());
    } catch (const ProtocolError& error) {
        violated(connection.rank(), error.what());
    }
}

void Connections::write(Connection& connection, const Connection::NextOutgoing& next_outgoing,
                        const Connection::Route& route) {
    const bool was_blocked = connection.is_blocked;
    connection.is_writable = false;
    try {
        if (connection.write(next_outgoing)) dirty.insert(connection.rank());
        // A blocked link has room again: the links that paused for it may go on.
        if (was_blocked && !connection.is_blocked) dirty.merge(std::exchange(paused, {}));
    } catch (const LinkError& error) {
        const int rank = connection.rank();
        const std::string text = error.what();
        // A write to a peer that has sent ABORT and closed fails while the ABORT lies unread. The
        // ABORT may name another rank, whose loss is the cause, so it is read before the peer is
        // blamed.
        read(connection, route);
        if (find(rank) == &connection) on_end(connection, text);
        return;
    }
    watch(connection);
}

// -- flow control

void Connections::consume(int rank, uint64_t nbytes) {
    const uint64_t credit = flow(rank).consume(nbytes);
    if (credit == 0 || find(rank) == nullptr) return;
    Outgoing outgoing;
    outgoing.frame = frame(Kind::credit, 0, credit);
    send_control(rank, std::move(outgoing));
}

void Connections::hold(int rank, uint64_t nbytes) {
    flow(rank).hold(nbytes);
    hooks_.on_hold(rank);
}

void Connections::release(int rank, uint64_t nbytes) {
    flow(rank).release(nbytes);
    consume(rank, nbytes);
}

// -- failures

// Nothing more is read from a peer that broke the protocol. After a wrong checksum the bytes are
// skipped, up to the end of the link (ProgressLoop::flush_abort).
void Connections::violated(int rank, const std::string& text) {
    if (Connection* connection = find(rank)) connection->has_aborted = true;
    lose(rank, GroupFailure::Kind::violated, text);
}

void Connections::lose(int rank, GroupFailure::Kind kind, const std::string& text) {
    state_.fail(kind, rank, text, hooks_.current());
}

// The link has ended. After a CLOSE the peer has left in order, which is no failure as long as no
// operation needs that rank.
void Connections::on_end(Connection& connection, const std::string& text) {
    const int rank = connection.rank();
    const bool has_closed = connection.has_closed;
    drop(connection);
    if (!has_closed) {
        lose(rank, GroupFailure::Kind::lost, text);
        return;
    }
    departed.insert(rank);
    hooks_.check_departed();
}

void Connections::check_departed(const Operation& operation) {
    const int gone = operation.missing(departed);
    if (gone >= 0) state_.fail(GroupFailure::Kind::left, gone, "", &operation);
}

}  // namespace potluck
