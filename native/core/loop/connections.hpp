// The connections of one rank in one group: readiness, I/O, and the accounting of flow control. The
// twin of engine/loop/connections.py. What a frame means is decided in plans.hpp and messages.hpp.
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

// A group, as far as the loop needs it: this rank's place among its members.
struct Group {
    uint32_t epoch = 0;
    int rank = 0;
    int world_size = 1;
};

class Connections {
public:
    struct Hooks {
        std::function<const Operation*()> current;  // the oldest operation under way, or nullptr
        std::function<void()> check_departed;       // a rank left: fail operations that need it
        std::function<void(int)> on_hold;           // a frame of that rank had to be kept
        std::function<void(int)> request;           // a link to that rank is wanted
        std::function<void(const AdoptedLink&)> released;  // the loop no longer uses that link
    };

    Connections(GroupState& state, Group group, uint64_t max_early_bytes,
                std::vector<std::shared_ptr<Counters>> counters, Hooks hooks);

    Poller poller;
    std::set<int> departed;  // ranks that left in order (CLOSE, then the end of the link)
    std::set<int> dirty;     // ranks for which there may be something to write
    std::set<int> ready;     // ranks from which there may be something to read
    std::set<int> paused;    // ranks whose links pause for a blocked link (Plans::must_wait)

    Connection* find(int rank) { return by_rank_[static_cast<size_t>(rank)].get(); }
    const std::vector<std::unique_ptr<Connection>>& all() const { return by_rank_; }
    bool is_empty() const { return num_connections_ == 0; }

    // -- links

    // Use a new link. A second link to a rank is released at once.
    void adopt(AdoptedLink link);
    // Request links to these ranks, where there are none.
    void need(const std::vector<int>& ranks);
    // Stop using a link at once. The connection is destroyed.
    void drop(Connection& connection);

    // -- bytes

    // Read and write on all links that are ready, a bounded amount per link.
    void move(const Connection::Route& route, const Connection::NextOutgoing& next_outgoing);
    // The poller has found the link to `rank` writable.
    void on_writable(int rank);
    // Send a frame before all data frames; a link is requested if there is none.
    void send_control(int peer, Outgoing outgoing);
    // Send a control frame that has no fields but its kind.
    void send_kind(int peer, Kind kind);
    // A frame from this rank in this epoch.
    Frame frame(Kind kind, uint32_t channel = 0, uint64_t sequence = 0) const;
    // Have the poller wait for what this link can do next.
    void watch(Connection& connection);

    // -- flow control (flow_control.hpp)

    FlowControl& flow(int rank) { return flows_[static_cast<size_t>(rank)]; }
    // A frame of `rank` has been used: return its credit, if enough has gathered.
    void consume(int rank, uint64_t nbytes);
    // A frame of `rank` must be kept: no operation here takes it yet.
    void hold(int rank, uint64_t nbytes);
    // A frame of `rank` that was kept has been used.
    void release(int rank, uint64_t nbytes);

    // -- failures

    // `rank` has broken the protocol, so that nothing after it on its link can be trusted.
    void violated(int rank, const std::string& text);
    // The link to `rank` is lost, or can't be had: end the group.
    void lose(int rank, GroupFailure::Kind kind, const std::string& text);
    // End the group if `operation` still needs something from a rank that left.
    void check_departed(const Operation& operation);

private:
    void read(Connection& connection, const Connection::Route& route);
    void write(Connection& connection, const Connection::NextOutgoing& next_outgoing,
               const Connection::Route& route);
    void on_end(Connection& connection, const std::string& text);

    GroupState& state_;
    const Group group_;
    Hooks hooks_;
    std::vector<std::shared_ptr<Counters>> counters_;
    std::vector<std::unique_ptr<Connection>> by_rank_;
    std::vector<int> watched_;  // 0: not at all, 1: for reading, 2: for writing too
    std::vector<FlowControl> flows_;
    std::map<int, std::deque<Outgoing>> unsent_;  // control frames for ranks without a link yet
    int num_connections_ = 0;
};

}  // namespace potluck
