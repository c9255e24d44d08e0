// How far two ranks may run apart: flow control per link. The twin of engine/loop/share.py, which
// says why. Counts only; sends nothing.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "core/loop/frame.hpp"

namespace potluck {

constexpr uint64_t share_overhead = 256;

class Share {
public:
    explicit Share(uint64_t limit) : limit_(limit) {}

    // -- sending

    // The peer has begun this operation, so all before it on its channel too.
    void has_begun(uint32_t channel, uint64_t operation) {
        uint64_t& next = begun_[channel];
        if (operation < next) return;
        next = operation + 1;
        if (begun_.size() > max_channels) {
            throw ProtocolError("it uses more than " + std::to_string(max_channels) + " channels");
        }
    }

    bool may_send(uint32_t channel, uint64_t operation, uint64_t nbytes) const {
        const auto found = begun_.find(channel);
        return (found != begun_.end() && operation < found->second) || has_room(nbytes);
    }

    // Whether the peer will keep that much more; anything, if it keeps nothing yet.
    bool has_room(uint64_t nbytes) const {
        return ahead_ == 0 || ahead_ + nbytes + share_overhead <= limit_;
    }

    void sent(uint64_t nbytes) { ahead_ += nbytes + share_overhead; }

    // The peer has used so much of what was sent.
    void reported(uint64_t used) {
        if (used > ahead_) {
            throw ProtocolError("it has used " + std::to_string(used) + " bytes, but only " +
                                std::to_string(ahead_) + " were sent");
        }
        ahead_ -= used;
    }

    // -- receiving

    // Whether the peer may soon have to wait, so that it must know what has begun here.
    bool is_filling() const { return 4 * held_ >= limit_; }

    // A frame must be kept.
    void hold(uint64_t nbytes) {
        held_ += nbytes + share_overhead;
        if (held_ > 2 * limit_) {
            throw ProtocolError("it has sent " + std::to_string(held_) +
                                " bytes for operations that this rank has not begun (is "
                                "max_early_bytes, here " +
                                std::to_string(limit_) + ", the same on all ranks?)");
        }
    }

    // A kept frame has found its use; `use` counts it.
    void release(uint64_t nbytes) { held_ -= nbytes + share_overhead; }

    // A frame has found its use: the bytes to report now, 0 while it is too few.
    uint64_t use(uint64_t nbytes) {
        unreported_ += nbytes + share_overhead;
        if (4 * unreported_ < limit_) return 0;
        const uint64_t report = unreported_;
        unreported_ = 0;
        return report;
    }

private:
    static constexpr size_t max_channels = 1 << 16;

    uint64_t limit_;
    uint64_t ahead_ = 0;
    uint64_t held_ = 0;
    uint64_t unreported_ = 0;
    std::unordered_map<uint32_t, uint64_t> begun_;
};

}  // namespace potluck
