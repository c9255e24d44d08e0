// Who is in an operation that does not end? The twin of engine/failures/inquest.py, which says why.
// Keeps what was heard; sends nothing.
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

struct Inquest {
    std::set<int> askers;
    std::vector<std::pair<int, bool>> heard;  // in the order in which it was heard

    bool has_heard(int rank) const {
        for (const auto& [other, called] : heard) {
            if (other == rank) return true;
        }
        return false;
    }

    // Who holds the operation up, -1 if (so far) nobody in particular. `is_final`: the time for
    // answers is over, so silence counts.
    int culprit(const std::vector<int>& ranks, const std::vector<int>& awaited,
                bool is_final) const {
        for (const auto& [rank, called] : heard) {
            if (!called) return rank;
        }
        if (!is_final) return -1;
        int first = -1;
        std::set<int> silent;
        for (int rank : ranks) {
            if (has_heard(rank)) continue;
            silent.insert(rank);
            if (first < 0) first = rank;
        }
        for (int rank : awaited) {
            if (silent.count(rank)) return rank;
        }
        return first;
    }
};

// The latest inquests, at most 64 of them: a peer may ask about anything.
class Inquests {
public:
    Inquest* get(const Key& key) {
        const auto found = by_key_.find(key);
        return found == by_key_.end() ? nullptr : &found->second;
    }

    // The inquest about `key`, and whether it is new.
    std::pair<Inquest*, bool> open(const Key& key) {
        if (Inquest* known = get(key)) return {known, false};
        if (order_.size() >= max_inquests) {
            by_key_.erase(order_.front());
            order_.pop_front();
        }
        order_.push_back(key);
        return {&by_key_[key], true};
    }

private:
    static constexpr size_t max_inquests = 64;

    std::map<Key, Inquest> by_key_;
    std::deque<Key> order_;
};

}  // namespace potluck
