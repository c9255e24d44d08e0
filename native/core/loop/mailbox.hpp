// Message matching of point-to-point operations, with the two queues of MPI libraries: posted
// receives, and unexpected messages. The twin of engine/loop/mailbox.py, where the eager and the
// rendezvous protocol are explained. Touches no link.
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
#include "core/loop/operation.hpp"

namespace potluck {

// A send under way. `data` is the caller's array: unchanged until the ticket has ended.
struct Sending : Operation {
    using Operation::Operation;

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
    uint64_t offset = 0;    // bytes given to the link so far (rendezvous)
    bool is_clear = false;  // CTS was received

    double deadline() const override { return until; }
    std::vector<Awaited> awaited() const override {
        return {{peer, "send of " + std::to_string(nbytes) + " bytes, tag " + std::to_string(tag)}};
    }
    int missing(const std::set<int>& departed) const override {
        return departed.count(peer) ? peer : -1;
    }
    std::string name() const override { return call; }
};

// A receive under way. `data` is the caller's array; `matched` is the rank that the message comes
// from, once known (-1: not yet).
struct Receiving : Operation {
    using Operation::Operation;

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
    // A receive from any source can't end once every other member of the channel has left.
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

// A message that has arrived: its bytes (EAGER), or only its RTS, and then `payload` is null.
struct Arrived {
    int source;
    Frame frame;
    uint64_t nbytes;
    std::shared_ptr<uint8_t[]> payload;
};

using SendingPtr = std::shared_ptr<Sending>;
using ReceivingPtr = std::shared_ptr<Receiving>;

// Whether the message has the size and dtype of the receive's array. Checked before a byte is
// written into that array, so that a peer can't write beyond it.
inline bool fits(const Receiving& receive, const Arrived& arrived) {
    return arrived.nbytes == receive.nbytes && arrived.frame.dtype == receive.dtype;
}

class Mailbox {
public:
    std::map<uint64_t, SendingPtr> sending;         // by message number: not sent completely yet
    std::map<int, std::deque<SendingPtr>> cleared;  // by peer: CTS received, in order of the CTS
    std::map<std::pair<int, uint64_t>, ReceivingPtr> receiving;  // CTS sent, pieces are due
    std::list<ReceivingPtr> posted;                 // without a message yet, in order of the calls

    // A receive was called: true and the first unexpected message that matches, or false, and the
    // receive is posted.
    bool post(const ReceivingPtr& receive, Arrived& arrived) {
        for (auto each = unexpected_.begin(); each != unexpected_.end(); ++each) {
            if (!receive->takes(each->source, each->frame)) continue;
            arrived = std::move(*each);
            unexpected_.erase(each);
            return true;
        }
        posted.push_back(receive);
        return false;
    }

    // A message has arrived: the first posted receive that matches, or nullptr, and the message is
    // kept as unexpected. In order of arrival, so messages of one source do not overtake each
    // other.
    ReceivingPtr arrive(Arrived arrived) {
        for (auto each = posted.begin(); each != posted.end(); ++each) {
            if (!(*each)->takes(arrived.source, arrived.frame)) continue;
            const ReceivingPtr found = *each;
            posted.erase(each);
            return found;
        }
        unexpected_.push_back(std::move(arrived));
        return nullptr;
    }

    template <typename Visit>
    void each_pending(const Visit& visit) const {
        for (const auto& [number, operation] : sending) visit(operation.get());
        for (const auto& operation : posted) visit(operation.get());
        for (const auto& [key, operation] : receiving) visit(operation.get());
    }

private:
    std::list<Arrived> unexpected_;
};

}  // namespace potluck
