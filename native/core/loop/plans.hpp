// The collectives under way on one rank: segments in, segments out, each checked before it counts.
// The twin of engine/loop/plans.py.
//
// Frames carry the number and the fingerprint of their call. One that comes before this rank has
// called, or before the memory it goes to is ready, is kept (`early`); one of another call ends the
// group. What a plan allows next is decided in plan.hpp, which rank holds up an operation in
// hang_detection.hpp.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/loop/plan.hpp"
#include "core/loop/connections.hpp"

namespace potluck {

class Plans {
public:
    Plans(GroupState& state, Connections& connections, Group group)
        : state_(state), connections_(connections), group_(group) {}

    void begin(std::shared_ptr<RunningPlan> running);

    // Ask about operations that stall, and end the group over one that is overdue.
    void check_deadlines(double now);
    // When check_deadlines has something to do; infinity if never.
    double wakes_at() const;

    // The operations under way, the oldest first.
    const std::list<std::shared_ptr<RunningPlan>>& pending() const { return running_; }

    // -- segments

    // The next segment that may go over this link; false if there is none now.
    bool next_outgoing(Connection& connection, Outgoing& outgoing);
    // Where the payload of a DATA frame goes.
    Sink route(Connection& connection, const Frame& frame);
    // Let `peer` know what has begun here, if it may be waiting to send that.
    void announce(int peer);

    // -- frames about operations

    void on_begun(Connection& connection, const Frame& frame);
    void on_hang_query(Connection& connection, const Frame& frame);
    void on_hang_report(Connection& connection, const Frame& frame);

private:
    using RunningPtr = std::shared_ptr<RunningPlan>;

    struct Ended {
        uint64_t sequence;
        uint64_t fingerprint;
        std::string call;
    };

    RunningPtr find(const Key& key) const;
    std::vector<RunningPlan*> oldest() const;
    RunningPlan* suspect() const;
    bool must_wait(const RunningPlan& running, int peer);
    void sent(const RunningPtr& running, const Segment& segment);
    void advance(const RunningPtr& running);
    Sink keep(const Frame& frame, void (Plans::*then)(int peer, KeptPtr kept), int peer);
    void on_early(int peer, KeptPtr kept);
    void on_waiting(int peer, KeptPtr kept);
    bool apply_early(RunningPlan& running, int peer);
    bool due(const RunningPlan& running, int peer, const Frame& frame, Segment& segment);
    void on_late(int peer, const Frame& frame);
    bool disagrees(int peer, const Frame& frame);
    void fail_desync(int peer, const RunningPlan& running, uint64_t theirs);
    void query(const RunningPlan& running, const std::vector<int>& peers, bool pass_on);
    void diagnose(RunningPlan& running, double now);
    void report(int peer, const Key& key, int rank, bool has_called);

    GroupState& state_;
    Connections& connections_;
    const Group group_;
    std::list<RunningPtr> running_;
    std::map<Key, std::list<RunningPtr>::iterator> by_key_;
    std::map<uint32_t, uint64_t> posted_;
    std::map<uint32_t, std::deque<Ended>> ended_;
    std::map<Key, std::map<int, std::deque<KeptPtr>>> early_;
    std::map<Key, std::map<int, uint64_t>> queries_;
    HangDetector hangs_;
};

}  // namespace potluck
