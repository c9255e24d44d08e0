// Hang detection: which rank holds up an operation that does not end. The twin of
// engine/failures/hang_detection.py, where the protocol is explained. Keeps reports; sends nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace potluck {

constexpr double stall_s = 0.25;
constexpr double answer_s = 0.25;

// Channel and number of an operation.
using Key = std::pair<uint32_t, uint64_t>;

struct HangCheck {
    std::set<int> askers;
    std::vector<std::pair<int, bool>> reports;  // (rank, has it made the call), as they came

    bool has_report(int rank) const {
        for (const auto& [other, called] : reports) {
            if (other == rank) return true;
        }
        return false;
    }

    // The rank that holds the operation up, -1 if none is known (yet). `is_final`: the time for
    // answers is over, so a missing report counts against its rank.
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

// The latest checks, at most 64: a peer may ask about operations that do not exist.
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
