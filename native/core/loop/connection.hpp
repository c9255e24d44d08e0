// A connection: one link as the loop sees it. Frames in, frames out, no policy. The twin of
// engine/loop/connection.py.
//
// It keeps what is half done: a header or payload half read, a frame half written, the free slots of
// link memory. It never blocks; `read` and `write` go on until the link has no more to give or
// take, or until the budget is spent, so that no link starves the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "core/loop/frame.hpp"
#include "core/tls/link.hpp"

namespace potluck {

constexpr size_t checksum_bytes = 4;
// What one call of `read` or `write` moves at most, about.
constexpr size_t budget_bytes = 2 * 1024 * 1024;

using Bytes = std::shared_ptr<std::vector<uint8_t>>;

// A frame to write. `sent` is called when its payload's memory is no longer needed.
struct Outgoing {
    Frame frame;
    const uint8_t* payload = nullptr;
    std::function<void()> sent;
    Bytes owned;  // keeps `payload` alive where it lies in no array of a caller
};

// Takes a part of a payload: bytes `offset` to `offset + count` of it.
using Consume = std::function<void(const uint8_t* part, size_t offset, size_t count)>;

// Where a payload goes, and what to do once it is there. Without `buffer` and `consume` the payload
// stays in the connection's own memory, and only `complete` looks at it.
struct Sink {
    uint8_t* buffer = nullptr;
    Consume consume;  // instead of a buffer: takes the payload in parts, as it comes
    std::function<void(const uint8_t* payload)> complete;
};

// What crossed one link; see metrics.LinkMeter. Written by the loop, read from any thread.
struct Counters {
    std::atomic<uint64_t> bytes_sent{0};
    std::atomic<uint64_t> bytes_received{0};
    std::atomic<uint64_t> bytes_in_shared_memory{0};
    std::atomic<uint64_t> messages_sent{0};
    std::atomic<uint64_t> messages_received{0};
};

class Connection {
public:
    using Source = std::function<bool(Connection&, Outgoing&)>;
    using Route = std::function<Sink(Connection&, const Frame&)>;

    Connection(Link link, std::shared_ptr<Counters> counters);

    int rank() const { return link_.rank; }
    const Link& link() const { return link_; }

    std::deque<Outgoing> control;
    bool has_closed = false;       // the peer will send nothing more
    bool is_acknowledged = false;  // the peer has read all that was sent before its CLOSE
    bool is_blocked = false;       // the link took less than offered; wait until it is writable
    bool has_room = false;         // it is writable now
    bool is_garbled = false;       // a checksum did not match: what comes makes no sense any more
    bool has_aborted = false;      // the peer has said why the group is over: nothing else matters

    bool is_writing() const;

    // Whether such a payload could start now (shared memory may be out of slots).
    bool can_take(size_t nbytes) const { return !fits_shared_memory(nbytes) || !slots_.empty(); }

    // Write until the link is full, `source` has nothing more, or the budget is spent. Returns true
    // if there may be more to write at once.
    bool write(const Source& source);

    // Read until the link has no more or the budget is spent; `route` places payloads. Returns true
    // if there may be more to read at once.
    bool read(const Route& route);

    // Take what has come and forget it. Returns true if there may be more at once.
    bool drain();

private:
    bool fits_shared_memory(size_t nbytes) const;
    size_t start(Outgoing outgoing);
    void encode_head(const Frame& frame);
    bool refill();
    void take(size_t count);
    void begin(const Frame& frame, const Route& route);
    void begin_in_shared_memory(const Frame& frame, const Route& route);
    size_t read_payload(size_t budget);
    bool read_checksum();
    void check(const uint8_t* theirs, uint32_t mine);
    void finish();
    void free_slot(int32_t slot);

    Link link_;
    std::shared_ptr<Counters> counters_;
    // With checksums a header has its own behind it, and so has a payload.
    const bool has_checksums_;
    const size_t header_bytes_;

    std::deque<uint32_t> slots_;
    std::set<uint32_t> unreleased_;

    std::vector<uint8_t> head_;  // a header, with a small payload behind it
    Piece pieces_[3] = {};
    size_t num_pieces_ = 0;
    size_t piece_ = 0;
    Piece rest_;  // of a payload with a checksum: what is in no piece yet
    uint32_t checksum_out_ = 0;
    uint8_t trailer_[checksum_bytes] = {};
    std::function<void()> sent_;
    Bytes owned_;

    uint8_t header_[frame_bytes + checksum_bytes] = {};
    size_t filled_ = 0;
    std::optional<Frame> frame_;
    Sink sink_;
    std::vector<uint8_t> whole_;
    std::vector<uint8_t> parts_;
    size_t in_parts_ = 0;
    uint32_t checksum_in_ = 0;
    uint8_t trailer_in_[checksum_bytes] = {};
    size_t trailer_filled_ = 0;
};

}  // namespace potluck
