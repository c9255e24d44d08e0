// A connection: the framing layer over one link. Frames in, frames out, no policy. The twin of
// engine/loop/connections.py.
//
// A connection keeps the state of half-done transfers: a header or payload half read, a frame half
// written, the free slots of link memory. It never blocks: `read` and `write` go on until the link
// would block, or until the budget is spent, so that no link starves the others.
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

// Bytes that one call of `read` or `write` moves at most, about. Tuned for this loop; the Python
// loop's is 8 MiB (docs/dev/found-out.md).
constexpr size_t budget_bytes = 2 * 1024 * 1024;

using Bytes = std::shared_ptr<std::vector<uint8_t>>;

// A frame to write. The payload is not copied: its memory must stay unchanged until `sent` is
// called.
struct Outgoing {
    Frame frame;
    const uint8_t* payload = nullptr;
    std::function<void()> sent;
    Bytes owned;  // keeps a payload alive that lies in no array of a caller
};

// Called with bytes `offset` to `offset + count` of a payload.
using Consume = std::function<void(const uint8_t* part, size_t offset, size_t count)>;

// Where the payload of an arriving frame goes. `complete` is called once all of it has come. With neither `buffer` nor `consume` the payload is
// kept in the connection's own memory, valid during `complete`.
struct Sink {
    uint8_t* buffer = nullptr;
    Consume consume;  // instead of a buffer: is given the payload in parts, as it arrives
    std::function<void(const uint8_t* payload)> complete;
};

// Traffic of one link; see metrics.LinkMeter. Written by the loop, read from any thread.
struct Counters {
    std::atomic<uint64_t> bytes_sent{0};
    std::atomic<uint64_t> bytes_received{0};
    std::atomic<uint64_t> bytes_in_shared_memory{0};
    std::atomic<uint64_t> messages_sent{0};
    std::atomic<uint64_t> messages_received{0};
};

class Connection {
public:
    using NextOutgoing = std::function<bool(Connection&, Outgoing&)>;
    using Route = std::function<Sink(Connection&, const Frame&)>;

    Connection(AdoptedLink link, std::shared_ptr<Counters> counters);

    int rank() const { return link_.rank; }
    const AdoptedLink& link() const { return link_; }

    std::deque<Outgoing> control;  // frames to be sent before any that `next_outgoing` gives
    bool has_closed = false;       // CLOSE was received: the peer will send nothing more
    bool is_acknowledged = false;  // CLOSE_ACK was received: the peer has read all up to our CLOSE
    bool is_blocked = false;       // the link took less than offered; wait until it is writable
    bool is_writable = false;      // the poller has found a blocked link writable
    bool has_aborted = false;      // ABORT was received, or is not to be waited for

    bool is_writing() const;

    // Whether a payload of this size could start now (link memory may be out of slots).
    bool can_start(size_t nbytes) const { return !uses_link_memory(nbytes) || !slots_.empty(); }

    // Write `control`, then the frames that `next_outgoing` gives, until the link would block,
    // there are no more, or the budget is spent. Returns true if more may be written at once.
    bool write(const NextOutgoing& next_outgoing);

    // Read frames until the link would block or the budget is spent; `route` gives the sink of each
    // payload. Returns true if there may be more to read at once. ProtocolError, LinkError.
    bool read(const Route& route);

private:
    // Whether the payload of a DATA or PIECE frame would travel through link memory.
    bool uses_link_memory(size_t nbytes) const;
    size_t start(Outgoing outgoing);
    void begin(const Frame& frame, const Route& route);
    void begin_in_link_memory(const Frame& frame, const Route& route);
    size_t read_payload(size_t budget);
    void finish();
    void free_slot(int32_t slot);

    AdoptedLink link_;
    std::shared_ptr<Counters> counters_;

    std::deque<uint32_t> slots_;     // outgoing slots that are free
    std::set<uint32_t> unreleased_;  // incoming slots whose SLOT_FREE has not been sent yet

    // The frame that is being written: pieces_[piece_] to pieces_[num_pieces_] are left. They point
    // into `head_` and the payload, which must not move meanwhile.
    std::vector<uint8_t> head_;  // the header, with a small payload behind it
    struct Piece {
        const uint8_t* data = nullptr;
        size_t count = 0;
    };
    Piece pieces_[2] = {};
    size_t num_pieces_ = 0;
    size_t piece_ = 0;
    std::function<void()> sent_;
    Bytes owned_;

    // The frame that is being read; `frame_` is empty until its header is complete. `filled_`
    // counts bytes of the header, then of the payload.
    uint8_t header_[frame_bytes] = {};
    size_t filled_ = 0;
    std::optional<Frame> frame_;
    Sink sink_;
    std::vector<uint8_t> payload_;      // where the sink names no memory
    std::vector<uint8_t> part_buffer_;  // where the sink consumes parts
    size_t part_filled_ = 0;
};

}  // namespace potluck
