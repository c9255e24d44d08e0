// The collectives under way on one rank: matches arriving segments with their calls, schedules
// outgoing segments, watches deadlines. The twin of engine/loop/plans.py.
//
// A frame carries the number and the fingerprint of its call. A frame that comes before this rank
// has made the call, or before its memory is ready, is kept (`early`); a frame that the plan does not
// receive next from this peer ends the group, as does one with another fingerprint (Desync). What a plan allows next is decided in plan.hpp, which rank
// blocks an operation in hang_detection.hpp.
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
    // This rank has left `channel` (of a sub-group), whose next call would be number
    // `next_sequence`. What is known of the channel goes when its calls under way have ended. A
    // later call means that the rank has entered it again.
    void leave(uint32_t channel, uint64_t next_sequence);

    // Query the peers about operations that stall; end the group over one that is overdue.
    void check_deadlines(double now);
    // When check_deadlines has something to do; infinity if never.
    double wakes_at() const;

    // The operations under way, the oldest first.
    const std::list<std::shared_ptr<RunningPlan>>& pending() const { return running_; }

    // -- segments

    // The next segment that may go over this link; false if there is none now.
    bool next_outgoing(Connection& connection, Outgoing& outgoing);
    // The sink of a DATA frame.
    Sink route(Connection& connection, const Frame& frame);
    // Tell `peer` which operations have begun here (BEGUN), if it may have no credit left for them.
    void tell_begun(int peer);

    // -- frames about operations

    void on_begun(Connection& connection, const Frame& frame);
    void on_hang_query(Connection& connection, const Frame& frame);
    void on_hang_report(Connection& connection, const Frame& frame);

private:
    using RunningPtr = std::shared_ptr<RunningPlan>;

    // A frame of a call that this rank has not made, with its payload.
    struct EarlyFrame {
        Frame frame;
        std::unique_ptr<uint8_t[]> payload;
    };
    struct Ended {
        uint64_t sequence;
        uint64_t fingerprint;
        std::string call;
    };

    RunningPtr find(const Key& key) const;
    bool is_running(uint32_t channel) const;
    void forget(uint32_t channel);
    bool was_called(const Frame& frame) const;
    void note_begun(int peer, const Frame& frame);
    std::vector<RunningPlan*> oldest() const;
    RunningPlan* next_overdue() const;
    bool must_wait(const RunningPlan& running, int peer);
    void sent(const RunningPtr& running, const Segment& segment);
    void advance(const RunningPtr& running);
    Sink keep(const Frame& frame, void (Plans::*then)(int peer, EarlyFrame kept), int peer);
    void on_early(int peer, EarlyFrame kept);
    void on_waiting(int peer, EarlyFrame kept);
    bool keep_waiting(RunningPlan& running, int peer, EarlyFrame kept);
    bool apply_early(RunningPlan& running, int peer);
    bool is_expected(const RunningPlan& running, int peer, const Frame& frame, Segment& segment);
    void on_late(int peer, const Frame& frame);
    bool disagrees(int peer, const Frame& frame);
    void fail_desync(int peer, const RunningPlan& running, uint64_t theirs);
    void query(const RunningPlan& running, const std::vector<int>& peers, bool pass_on);
    void diagnose(RunningPlan& running, double now);
    void report(int peer, const Key& key, int rank, bool has_called);

    GroupState& state_;
    Connections& connections_;
    const Group group_;
    std::list<RunningPtr> running_;  // in the order of the calls
    std::map<Key, std::list<RunningPtr>::iterator> by_key_;
    std::map<uint32_t, uint64_t> next_sequence_;   // by channel: the number of the next call
    std::map<uint32_t, uint64_t> left_;  // the same of channels that this rank has left: the latest
    std::deque<uint32_t> left_order_;    // their order, and channels that were entered again
    std::map<uint32_t, std::deque<Ended>> ended_;  // by channel: the latest calls that ended
    // Frames of calls that this rank has not made, by peer. Bounded by flow control.
    std::map<Key, std::map<int, std::deque<EarlyFrame>>> early_;
    // Fingerprints that peers queried for such calls. Bounded by `max_unread`.
    std::map<Key, std::map<int, uint64_t>> queries_;
    HangDetector hangs_;
};

}  // namespace potluck
