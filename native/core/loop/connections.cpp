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

// -- links come and go

void Connections::adopt(Link link) {
    const int rank = link.rank;
    if (find(rank) != nullptr || departed.count(rank)) {
        hooks_.let_go(link);
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

void Connections::drop(Connection& connection) {
    const auto rank = static_cast<size_t>(connection.rank());
    if (watched_[rank] != 0) poller.forget(connection.link().stream->fd());
    watched_[rank] = 0;
    --num_connections_;
    const std::unique_ptr<Connection> last = std::move(by_rank_[rank]);
    hooks_.let_go(last->link());
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

void Connections::move(const Connection::Route& route, const Connection::Source& source) {
    for (int rank : std::exchange(ready, {})) {
        if (Connection* connection = find(rank)) {
            read(*connection, route);
            dirty.insert(rank);
        }
    }
    for (int rank : std::exchange(dirty, {})) {
        Connection* connection = find(rank);
        // A full link says when it has room; until then each try would be a call in vain.
        if (connection != nullptr && (connection->has_room || !connection->is_blocked))
            write(*connection, source, route);
    }
}

void Connections::has_room(int rank) {
    if (Connection* connection = find(rank)) {
        connection->has_room = true;
        dirty.insert(rank);
    }
}

void Connections::tell(int peer, Outgoing outgoing) {
    if (Connection* connection = find(peer)) {
        connection->control.push_back(std::move(outgoing));
        dirty.insert(peer);
        return;
    }
    hooks_.request(peer);
    unsent_[peer].push_back(std::move(outgoing));
}

void Connections::say(int peer, Kind kind) {
    Outgoing outgoing;
    outgoing.frame = frame(kind);
    tell(peer, std::move(outgoing));
}

Frame Connections::frame(Kind kind, uint32_t channel, uint64_t operation) const {
    Frame made;
    made.kind = kind;
    made.epoch = group_.epoch;
    made.source = static_cast<uint16_t>(group_.rank);
    made.channel = channel;
    made.operation = operation;
    return made;
}

void Connections::read(Connection& connection, const Connection::Route& route) {
    try {
        if (connection.read(route) || connection.link().stream->is_readable())
            ready.insert(connection.rank());
    } catch (const LinkError& error) {
        ended(connection, error.what());
    } catch (const ProtocolError& error) {
        violated(connection.rank(), error.what());
    }
}

void Connections::write(Connection& connection, const Connection::Source& source,
                        const Connection::Route& route) {
    const bool was_blocked = connection.is_blocked;
    connection.has_room = false;
    try {
        if (connection.write(source)) dirty.insert(connection.rank());
        if (was_blocked && !connection.is_blocked) dirty.merge(std::exchange(held, {}));
    } catch (const LinkError& error) {
        const int rank = connection.rank();
        const std::string text = error.what();
        read(connection, route);  // its last words may name another rank, which it has lost
        if (find(rank) == &connection) ended(connection, text);
        return;
    }
    watch(connection);
}

// -- early frames

void Connections::consume(int rank, uint64_t nbytes) {
    const uint64_t credit = flow(rank).consume(nbytes);
    if (credit == 0 || find(rank) == nullptr) return;
    Outgoing outgoing;
    outgoing.frame = frame(Kind::credit, 0, credit);
    tell(rank, std::move(outgoing));
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

void Connections::violated(int rank, const std::string& text) {
    if (Connection* connection = find(rank)) connection->has_aborted = !connection->is_garbled;
    lose(rank, GroupFailure::Kind::violated, text);
}

void Connections::lose(int rank, GroupFailure::Kind kind, const std::string& text) {
    state_.fail(kind, rank, text, hooks_.current());
}

void Connections::ended(Connection& connection, const std::string& text) {
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

void Connections::check_departed(const Item& item) {
    const int gone = item.missing(departed);
    if (gone >= 0) state_.fail(GroupFailure::Kind::left, gone, "", &item);
}

}  // namespace potluck
