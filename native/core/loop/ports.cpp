#include "core/loop/ports.hpp"

#include <utility>

namespace potluck {

Ports::Ports(Fate& fate, Seat seat, uint64_t max_early_bytes,
             std::vector<std::shared_ptr<Counters>> counters, Hooks hooks)
    : fate_(fate),
      seat_(seat),
      hooks_(std::move(hooks)),
      counters_(std::move(counters)),
      by_rank_(static_cast<size_t>(seat.world_size)),
      watched_(static_cast<size_t>(seat.world_size)),
      shares_(static_cast<size_t>(seat.world_size), Share(max_early_bytes)) {}

// -- links come and go

void Ports::adopt(Link link) {
    const int rank = link.rank;
    if (find(rank) != nullptr || departed.count(rank)) {
        hooks_.let_go(link);
        return;
    }
    auto& port = by_rank_[static_cast<size_t>(rank)];
    port = std::make_unique<Port>(std::move(link), counters_[static_cast<size_t>(rank)]);
    ++num_ports_;
    const auto waiting = unsent_.find(rank);
    if (waiting != unsent_.end()) {
        port->control = std::move(waiting->second);
        unsent_.erase(waiting);
    }
    watch(*port);
    ready.insert(rank);
}

void Ports::need(const std::vector<int>& ranks) {
    for (int rank : ranks) {
        if (find(rank) == nullptr && !departed.count(rank)) hooks_.request(rank);
    }
}

void Ports::drop(Port& port) {
    const auto rank = static_cast<size_t>(port.rank());
    if (watched_[rank] != 0) poller.forget(port.link().stream->fd());
    watched_[rank] = 0;
    --num_ports_;
    const std::unique_ptr<Port> last = std::move(by_rank_[rank]);
    hooks_.let_go(last->link());
}

void Ports::watch(Port& port) {
    int& before = watched_[static_cast<size_t>(port.rank())];
    const int wanted = port.is_blocked ? 2 : 1;
    if (before == wanted) return;
    poller.watch(port.link().stream->fd(), port.rank(), port.is_blocked, before == 0);
    before = wanted;
}

// -- bytes

void Ports::move(const Port::Route& route, const Port::Source& source) {
    for (int rank : std::exchange(ready, {})) {
        if (Port* port = find(rank)) {
            read(*port, route);
            dirty.insert(rank);
        }
    }
    for (int rank : std::exchange(dirty, {})) {
        Port* port = find(rank);
        // A full link says when it has room; until then each try would be a call in vain.
        if (port != nullptr && (port->has_room || !port->is_blocked)) write(*port, source);
    }
}

void Ports::has_room(int rank) {
    if (Port* port = find(rank)) {
        port->has_room = true;
        dirty.insert(rank);
    }
}

void Ports::tell(int peer, Outgoing outgoing) {
    if (Port* port = find(peer)) {
        port->control.push_back(std::move(outgoing));
        dirty.insert(peer);
        return;
    }
    hooks_.request(peer);
    unsent_[peer].push_back(std::move(outgoing));
}

void Ports::say(int peer, Kind kind) {
    Outgoing outgoing;
    outgoing.frame = frame(kind);
    tell(peer, std::move(outgoing));
}

Frame Ports::frame(Kind kind, uint32_t channel, uint64_t operation) const {
    Frame made;
    made.kind = kind;
    made.epoch = seat_.epoch;
    made.source = static_cast<uint16_t>(seat_.rank);
    made.channel = channel;
    made.operation = operation;
    return made;
}

void Ports::read(Port& port, const Port::Route& route) {
    try {
        if (port.read(route) || port.link().stream->is_readable()) ready.insert(port.rank());
    } catch (const LinkError& error) {
        ended(port, error.what());
    } catch (const ProtocolError& error) {
        violated(port.rank(), error.what());
    }
}

void Ports::write(Port& port, const Port::Source& source) {
    const bool was_blocked = port.is_blocked;
    port.has_room = false;
    try {
        if (port.write(source)) dirty.insert(port.rank());
        if (was_blocked && !port.is_blocked) dirty.merge(std::exchange(held, {}));
    } catch (const LinkError& error) {
        ended(port, error.what());
        return;
    }
    watch(port);
}

// -- early frames

void Ports::use(int rank, uint64_t nbytes) {
    const uint64_t report = share(rank).use(nbytes);
    if (report == 0 || find(rank) == nullptr) return;
    Outgoing outgoing;
    outgoing.frame = frame(Kind::used, 0, report);
    tell(rank, std::move(outgoing));
}

void Ports::hold(int rank, uint64_t nbytes) {
    share(rank).hold(nbytes);
    hooks_.on_hold(rank);
}

void Ports::release(int rank, uint64_t nbytes) {
    share(rank).release(nbytes);
    use(rank, nbytes);
}

// -- failures

void Ports::violated(int rank, const std::string& text) {
    if (Port* port = find(rank)) port->said_abort = !port->is_garbled;
    lose(rank, Fact::Kind::violated, text);
}

void Ports::lose(int rank, Fact::Kind kind, const std::string& text) {
    fate_.fail(kind, rank, text, hooks_.current());
}

void Ports::ended(Port& port, const std::string& text) {
    const int rank = port.rank();
    const bool said_goodbye = port.said_goodbye;
    drop(port);
    if (!said_goodbye) {
        lose(rank, Fact::Kind::lost, text);
        return;
    }
    departed.insert(rank);
    hooks_.check_departed();
}

void Ports::check_departed(const Item& item) {
    const int gone = item.missing(departed);
    if (gone >= 0) fate_.fail(Fact::Kind::left, gone, "", &item);
}

}  // namespace potluck
