// Hang detection: finds the rank that blocks an operation which does not end. The twin of
// engine/loop/plans.py, where the protocol is explained. Keeps reports; sends nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace potluck {

constexpr double stall_s = 0.25;   // an operation that has run for so long queries its peers
constexpr double answer_s = 1.0;   // how long reports are waited for after the deadline

// Channel and number of an operation.
using Key = std::pair<uint32_t, uint64_t>;

struct HangCheck {
    std::set<int> askers;
    std::vector<std::pair<int, bool>> reports;  // (rank, has made the call), in order of arrival

    bool has_report(int rank) const {
        for (const auto& [other, called] : reports) {
            if (other == rank) return true;
        }
        return false;
    }

    // The rank that blocks the operation, -1 if none is known (yet). `is_final`: the time for
    // reports is over, so a missing report counts against its rank. Of several silent ranks one
    // that this rank awaits comes first: only of that one it is known that its silence matters.
    int blocking_rank(const std::vector<int>& ranks, const std::vector<int>& awaited,
                      bool is_final) const {
        for (const auto& [rank, called] : reports) {
            if (!called) return rank;
        }
        if (!is_final) return -1;
        int first = -1;
        std::set<int> silent;
        for (int rank : ranks) {
            if (has_report(rank)) continue;
            silent.insert(rank);
            if (first < 0) first = rank;
        }
        for (int rank : awaited) {
            if (silent.count(rank)) return rank;
        }
        return first;
    }
};

// The latest checks, at most 64: a peer may query operations that do not exist, without end.
class HangDetector {
public:
    HangCheck* get(const Key& key) {
        const auto found = by_key_.find(key);
        return found == by_key_.end() ? nullptr : &found->second;
    }

    // The check of operation `key`, and whether it is new.
    std::pair<HangCheck*, bool> open(const Key& key) {
        if (HangCheck* known = get(key)) return {known, false};
        if (order_.size() >= max_checks) {
            by_key_.erase(order_.front());
            order_.pop_front();
        }
        order_.push_back(key);
        return {&by_key_[key], true};
    }

private:
    static constexpr size_t max_checks = 64;

    std::map<Key, HangCheck> by_key_;
    std::deque<Key> order_;
};

}  // namespace potluck
