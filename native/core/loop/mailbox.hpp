// Point-to-point messages: matching sends with receives. The twin of engine/loop/mailbox.py, where
// the protocol is explained. Touches no link.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/loop/frame.hpp"
#include "core/loop/item.hpp"

namespace potluck {

// A message on its way out.
struct Sending : Item {
    using Item::Item;

    std::string call;
    int peer = 0;
    uint32_t channel = 0;
    int32_t tag = 0;
    uint8_t dtype = 0;
    uint64_t number = 0;
    const uint8_t* data = nullptr;
    uint64_t nbytes = 0;
    double until = 0;
    double started = 0;
    uint64_t offset = 0;
    bool is_clear = false;

    double deadline() const override { return until; }
    std::vector<Awaited> awaited() const override {
        return {{peer, "send of " + std::to_string(nbytes) + " bytes, tag " + std::to_string(tag)}};
    }
    int missing(const std::set<int>& departed) const override {
        return departed.count(peer) ? peer : -1;
    }
    std::string name() const override { return call; }
};

// A posted receive; `matched` is the rank it receives from, once known (-1: not yet).
struct Receiving : Item {
    using Item::Item;

    std::string call;
    int source = -1;  // -1: any
    uint32_t channel = 0;
    std::vector<int> ranks;  // the channel's members
    int32_t tag = 0;
    uint8_t dtype = 0;
    uint8_t* data = nullptr;
    uint64_t nbytes = 0;
    double until = 0;
    double started = 0;
    int matched = -1;
    uint64_t offset = 0;
    uint32_t num_pieces = 0;

    double deadline() const override { return until; }
    std::vector<Awaited> awaited() const override {
        return {{matched < 0 ? source : matched,
                 "receive of " + std::to_string(nbytes) + " bytes, tag " + std::to_string(tag)}};
    }
    int missing(const std::set<int>& departed) const override {
        const int wanted = matched < 0 ? source : matched;
        if (wanted >= 0) return departed.count(wanted) ? wanted : -1;
        size_t num_left = 0;
        int gone = -1;
        for (int rank : ranks) {
            if (!departed.count(rank)) {
                ++num_left;
            } else if (gone < 0 || rank < gone) {
                gone = rank;
            }
        }
        return num_left <= 1 && ranks.size() > 1 ? gone : -1;  // this rank is always among them
    }
    std::string name() const override { return call; }

    bool takes(int from, const Frame& frame) const {
        return frame.channel == channel && frame.tag == tag && (source < 0 || source == from) &&
               std::find(ranks.begin(), ranks.end(), from) != ranks.end();
    }
};

// An unexpected message, one that came before its receive: its bytes, or only its RTS.
struct Arrived {
    int source;
    Frame frame;
    uint64_t nbytes;
    std::shared_ptr<uint8_t[]> payload;
};

using SendingPtr = std::shared_ptr<Sending>;
using ReceivingPtr = std::shared_ptr<Receiving>;

// Whether the message has the size and dtype of the array that waits for it.
inline bool fits(const Receiving& receive, const Arrived& arrived) {
    return arrived.nbytes == receive.nbytes && arrived.frame.dtype == receive.dtype;
}

class Mailbox {
public:
    std::map<uint64_t, SendingPtr> sending;
    std::map<int, std::deque<SendingPtr>> cleared;
    std::map<std::pair<int, uint64_t>, ReceivingPtr> receiving;
    std::list<ReceivingPtr> posted;

    // A receive was called: true, and the message that already waits for it, if one does.
    bool post(const ReceivingPtr& receive, Arrived& arrived) {
        for (auto each = early_.begin(); each != early_.end(); ++each) {
            if (!receive->takes(each->source, each->frame)) continue;
            arrived = std::move(*each);
            early_.erase(each);
            return true;
        }
        posted.push_back(receive);
        return false;
    }

    // A message came: the receive that waits for it, or nullptr, and it is kept.
    ReceivingPtr arrive(Arrived arrived) {
        for (auto each = posted.begin(); each != posted.end(); ++each) {
            if (!(*each)->takes(arrived.source, arrived.frame)) continue;
            const ReceivingPtr found = *each;
            posted.erase(each);
            return found;
        }
        early_.push_back(std::move(arrived));
        return nullptr;
    }

    template <typename Visit>
    void each_pending(const Visit& visit) const {
        for (const auto& [number, item] : sending) visit(item.get());
        for (const auto& item : posted) visit(item.get());
        for (const auto& [key, item] : receiving) visit(item.get());
    }

private:
    std::list<Arrived> early_;
};

}  // namespace potluck
