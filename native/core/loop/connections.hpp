// The connections of one rank in one group: which can be read, which have frames to write. The twin
// of engine/loop/connections.py. What a frame means is decided in plans.hpp and messages.hpp.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "core/loop/group_state.hpp"
#include "core/loop/poller.hpp"
#include "core/loop/connection.hpp"
#include "core/loop/flow_control.hpp"

namespace potluck {

// A group, as far as the loop needs it: this rank's place in it.
struct Group {
    uint32_t epoch = 0;
    int rank = 0;
    int world_size = 1;
};

class Connections {
public:
    struct Hooks {
        std::function<const Item*()> current;    // the oldest operation under way, or nullptr
        std::function<void()> check_departed;    // a rank left: fail operations that need it
        std::function<void(int)> on_hold;        // a frame of that rank had to be kept
        std::function<void(int)> request;        // a link to that rank is wanted
        std::function<void(const Link&)> let_go; // the loop no longer uses that link
    };

    Connections(GroupState& state, Group group, uint64_t max_early_bytes,
                std::vector<std::shared_ptr<Counters>> counters, Hooks hooks);

    Poller poller;
    std::set<int> departed;
    std::set<int> dirty;  // ranks for which there may be something to write
    std::set<int> ready;  // ranks from which there may be something to read
    std::set<int> held;   // ranks whose links pause until a blocked link has room (must_wait)

    Connection* find(int rank) { return by_rank_[static_cast<size_t>(rank)].get(); }
    const std::vector<std::unique_ptr<Connection>>& all() const { return by_rank_; }
    bool is_empty() const { return num_connections_ == 0; }

    // -- links come and go

    void adopt(Link link);
    void need(const std::vector<int>& ranks);
    void drop(Connection& connection);

    // -- bytes

    // Read what has come and write what may go, a bounded amount per link.
    void move(const Connection::Route& route, const Connection::Source& source);
    // The link that was full has room again.
    void has_room(int rank);
    // Send a frame before all data; a link is made if there is none.
    void tell(int peer, Outgoing outgoing);
    // Send a frame that is nothing but its kind.
    void say(int peer, Kind kind);
    // A frame from this rank in this epoch.
    Frame frame(Kind kind, uint32_t channel = 0, uint64_t operation = 0) const;
    // Wait for what this link can do next.
    void watch(Connection& connection);

    // -- early frames

    FlowControl& flow(int rank) { return flows_[static_cast<size_t>(rank)]; }
    void consume(int rank, uint64_t nbytes);
    void hold(int rank, uint64_t nbytes);
    void release(int rank, uint64_t nbytes);

    // -- failures

    // What `rank` sent makes no sense, so nothing after it does either.
    void violated(int rank, const std::string& text);
    void lose(int rank, GroupFailure::Kind kind, const std::string& text);
    // An operation that still needs something from a rank that left can't end.
    void check_departed(const Item& item);

private:
    void read(Connection& connection, const Connection::Route& route);
    void write(Connection& connection, const Connection::Source& source,
               const Connection::Route& route);
    void ended(Connection& connection, const std::string& text);

    GroupState& state_;
    const Group group_;
    Hooks hooks_;
    std::vector<std::shared_ptr<Counters>> counters_;
    std::vector<std::unique_ptr<Connection>> by_rank_;
    std::vector<int> watched_;  // 0: not, 1: for bytes, 2: for room too
    std::vector<FlowControl> flows_;
    std::map<int, std::deque<Outgoing>> unsent_;
    int num_connections_ = 0;
};

}  // namespace potluck
