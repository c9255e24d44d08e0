// Credit-based flow control of one link: bounds the memory that a rank needs for frames of a peer
// that is ahead of it. The twin of engine/loop/flow_control.py, where the rules and their reasons
// are (also why BEGUN frames are needed: credits alone would deadlock). Only counts; sends nothing.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "core/loop/frame.hpp"

namespace potluck {

// What each frame costs beside its payload, so that the number of empty frames is bounded too.
constexpr uint64_t frame_overhead = 256;

class FlowControl {
public:
    explicit FlowControl(uint64_t limit) : limit_(limit) {}

    // -- sending

    // The peer has begun this call, hence all before it on its channel too.
    void has_begun(uint32_t channel, uint64_t sequence) {
        uint64_t& next = begun_[channel];
        if (sequence < next) return;
        next = sequence + 1;
        if (begun_.size() > max_channels) {
            throw ProtocolError("it uses more than " + std::to_string(max_channels) + " channels");
        }
    }

    // No call of this channel is under way on this rank, and none is expected.
    void forget(uint32_t channel) { begun_.erase(channel); }

    // Whether a frame of a collective may be sent now: the peer has begun the operation, so that
    // the plan bounds what it must keep, or there is credit for it.
    bool may_send(uint32_t channel, uint64_t sequence, uint64_t nbytes) const {
        const auto found = begun_.find(channel);
        return (found != begun_.end() && sequence < found->second) || has_credit(nbytes);
    }

    // Whether a payload of `nbytes` may be sent to a peer that may have to keep it. With nothing in
    // flight any size may go, or a frame above the limit would wait for ever.
    bool has_credit(uint64_t nbytes) const {
        return in_flight_ == 0 || in_flight_ + nbytes + frame_overhead <= limit_;
    }

    // A frame was sent: its credit is spent, also if it needed none. The receiver can't tell which
    // frames needed credit and returns it for every frame, so every frame must be counted.
    void sent(uint64_t nbytes) { in_flight_ += nbytes + frame_overhead; }

    // The peer returns credit. ProtocolError if that is more than was spent: `in_flight_` would
    // wrap around, and no frame could be sent any more.
    void add_credit(uint64_t nbytes) {
        if (nbytes > in_flight_) {
            throw ProtocolError("it returned credit for " + std::to_string(nbytes) +
                                " bytes, but only " + std::to_string(in_flight_) + " were sent");
        }
        in_flight_ -= nbytes;
    }

    // Bytes sent whose credit the peer has not returned.
    uint64_t in_flight() const { return in_flight_; }

    // -- receiving

    // Whether the peer may run out of credit soon, so that it must know what has begun here.
    bool is_filling() const { return 4 * held_bytes_ >= limit_; }

    // Bytes that are held here: of early frames of calls that have not begun, and of messages that
    // nothing receives yet. What waits of a call that has begun is bounded by its plan.
    uint64_t held_bytes() const { return held_bytes_; }

    // A frame must be kept. ProtocolError if the peer has sent beyond its credit; twice the limit,
    // because RTS frames are sent without asking for credit.
    void hold(uint64_t nbytes) {
        held_bytes_ += nbytes + frame_overhead;
        if (held_bytes_ > 2 * limit_) {
            throw ProtocolError("it has sent " + std::to_string(held_bytes_) +
                                " bytes for operations that this rank has not begun (is "
                                "max_early_bytes, here " +
                                std::to_string(limit_) + ", the same on all ranks?)");
        }
    }

    // A kept frame is kept no longer; `consume` must follow, which returns its credit.
    void release(uint64_t nbytes) { held_bytes_ -= nbytes + frame_overhead; }

    // A frame has been used. Returns the credit to send back now: a quarter of the limit at a time,
    // so that CREDIT frames are few, yet come before the sender runs out; 0 until then.
    uint64_t consume(uint64_t nbytes) {
        unreturned_ += nbytes + frame_overhead;
        if (4 * unreturned_ < limit_) return 0;
        const uint64_t credit = unreturned_;
        unreturned_ = 0;
        return credit;
    }

private:
    // A peer names channels freely; without a bound it could make `begun_` grow for ever.
    static constexpr size_t max_channels = 1 << 16;

    uint64_t limit_;
    uint64_t in_flight_ = 0;
    uint64_t held_bytes_ = 0;
    uint64_t unreturned_ = 0;
    // By channel: the first operation that the peer has not begun, as far as is known.
    std::unordered_map<uint32_t, uint64_t> begun_;
};

}  // namespace potluck
