#include "core/loop/connection.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace potluck {

namespace {

// Payloads up to this size are copied behind their header, so that both go out in one TLS record.
constexpr size_t merge_bytes = 8 * 1024;
// Payloads from this size on travel through link memory, where there is any.
constexpr size_t link_memory_bytes = 4 * 1024;
// A payload that is to be reduced is received into a buffer of this size, and reduced from there
// part by part: the buffer stays in the L2 cache, where a whole segment would not. It is a multiple
// of every element size, so no element is cut.
constexpr size_t part_bytes = 64 * 1024;

void add(std::atomic<uint64_t>& counter, uint64_t count) {
    counter.fetch_add(count, std::memory_order_relaxed);
}

}  // namespace

Connection::Connection(AdoptedLink link, std::shared_ptr<Counters> counters)
    : link_(std::move(link)),
      counters_(std::move(counters)) {
    for (uint32_t slot = 0; slot < link_.memory.num_slots(); ++slot) slots_.push_back(slot);
}

// -- outgoing

bool Connection::is_writing() const {
    return piece_ < num_pieces_ || !control.empty() || link_.stream->unsent() > 0;
}

bool Connection::uses_link_memory(size_t nbytes) const {
    return link_.memory.num_slots() > 0 && link_memory_bytes <= nbytes &&
           nbytes <= link_.memory.slot_bytes;
}

bool Connection::write(const NextOutgoing& next_outgoing) {
    size_t budget = budget_bytes;
    is_blocked = false;
    bool has_more = true;
    while (budget > 0) {
        if (piece_ == num_pieces_) {
            Outgoing outgoing;
            if (!control.empty()) {
                outgoing = std::move(control.front());
                control.pop_front();
            } else if (!next_outgoing(*this, outgoing)) {
                has_more = false;
                break;
            }
            budget -= std::min(budget, start(std::move(outgoing)));
        }
        for (; piece_ < num_pieces_; ++piece_) {
            Piece& piece = pieces_[piece_];
            const size_t taken = link_.stream->send(piece.data, piece.count);
            add(counters_->bytes_sent, taken);
            budget -= std::min(budget, taken);
            piece.data += taken;
            piece.count -= taken;
            if (piece.count > 0) {
                link_.stream->flush();
                is_blocked = true;
                return false;
            }
        }
        // The stream has copied the last byte (or the kernel has): the payload's memory is free.
        // Moved out of the member first: the callback may end the operation and what it holds.
        owned_.reset();
        if (sent_) {
            const std::function<void()> sent = std::move(sent_);
            sent_ = nullptr;
            sent();
        }
    }
    link_.stream->flush();
    is_blocked = link_.stream->unsent() > 0;
    return has_more && !is_blocked;
}

// Begin to write a frame; returns the bytes that went through link memory.
size_t Connection::start(Outgoing outgoing) {
    Frame& frame = outgoing.frame;
    const size_t nbytes = frame.length;
    add(counters_->messages_sent, 1);
    num_pieces_ = piece_ = 0;
    const bool is_bulk = frame.kind == Kind::data || frame.kind == Kind::piece;
    if (is_bulk && uses_link_memory(nbytes) && !slots_.empty()) {
        const uint32_t slot = slots_.front();
        slots_.pop_front();
        // The frame that follows over the socket orders these stores: the receiver reads the slot
        // only after that frame, and the locks of the kernel's socket make the send happen before
        // the receive. So the slots need no locks and no fences.
        std::memcpy(link_.memory.outgoing[slot], outgoing.payload, nbytes);
        add(counters_->bytes_sent, nbytes);
        add(counters_->bytes_in_shared_memory, nbytes);
        frame.flags |= in_link_memory;
        frame.tag = static_cast<int32_t>(slot);
        head_.resize(frame_bytes);
        encode(frame, head_.data());
        pieces_[num_pieces_++] = {head_.data(), head_.size()};
        if (outgoing.sent) outgoing.sent();  // the payload has been copied: its memory is free
        return nbytes;
    }
    head_.resize(frame_bytes);
    encode(frame, head_.data());
    if (nbytes <= merge_bytes) {
        head_.insert(head_.end(), outgoing.payload, outgoing.payload + nbytes);
    }
    pieces_[num_pieces_++] = {head_.data(), head_.size()};
    if (nbytes > merge_bytes) pieces_[num_pieces_++] = {outgoing.payload, nbytes};
    sent_ = std::move(outgoing.sent);
    owned_ = std::move(outgoing.owned);
    return 0;
}

// -- incoming

bool Connection::read(const Route& route) {
    size_t budget = budget_bytes;
    while (budget > 0) {
        size_t taken = 0;
        if (!frame_) {
            taken = link_.stream->recv(header_ + filled_, frame_bytes - filled_);
            if (taken == 0) return false;
            add(counters_->bytes_received, taken);
            filled_ += taken;
            if (filled_ < frame_bytes) continue;
            filled_ = 0;
            begin(decode(header_), route);
        } else if (filled_ < frame_->length) {
            taken = read_payload(budget);
            if (taken == 0) return false;
            add(counters_->bytes_received, taken);
        }
        budget -= std::min(budget, taken);
        if (frame_ && filled_ == frame_->length) finish();
    }
    return true;
}

// A header is complete. `decode` has checked its length against the bound of its kind, so that the
// memory taken here is bounded whatever the peer sends.
void Connection::begin(const Frame& frame, const Route& route) {
    add(counters_->messages_received, 1);
    if (frame.kind == Kind::slot_free) {
        free_slot(frame.tag);
        return;
    }
    if (frame.flags & in_link_memory) {
        begin_in_link_memory(frame, route);
        return;
    }
    sink_ = route(*this, frame);
    frame_ = frame;
    part_filled_ = 0;
    if (!sink_.buffer) {
        if (sink_.consume) {
            part_buffer_.resize(part_bytes);
        } else {
            if (payload_.size() < frame.length) payload_.resize(frame.length);
        }
    }
}

void Connection::begin_in_link_memory(const Frame& frame, const Route& route) {
    const LinkMemory& memory = link_.memory;
    const auto slot = static_cast<uint32_t>(frame.tag);  // a negative tag fails the bound below
    if (memory.num_slots() == 0 || frame.length > memory.slot_bytes) {
        throw ProtocolError("a frame points to a link-memory slot that this link does not have");
    }
    if (slot >= memory.num_slots()) {
        throw ProtocolError("link-memory slot " + std::to_string(frame.tag) +
                            " was named; there are " + std::to_string(memory.num_slots()));
    }
    if (unreleased_.count(slot)) {
        throw ProtocolError("link-memory slot " + std::to_string(slot) +
                            " was used again before it was free");
    }
    const uint8_t* payload = memory.incoming[slot];
    add(counters_->bytes_received, frame.length);
    const Sink sink = route(*this, frame);
    if (sink.consume) {
        sink.consume(payload, 0, frame.length);
    } else if (sink.buffer) {
        std::memcpy(sink.buffer, payload, frame.length);
    }
    sink.complete(sink.buffer ? sink.buffer : payload);
    // The slot is the peer's again once SLOT_FREE has been sent. A peer that names the slot before
    // has not waited for SLOT_FREE, and may have overwritten the payload while it was read here.
    unreleased_.insert(slot);
    Outgoing free;
    free.frame.kind = Kind::slot_free;
    free.frame.epoch = frame.epoch;
    free.frame.tag = frame.tag;
    free.sent = [this, slot] { unreleased_.erase(slot); };
    control.push_back(std::move(free));
}

// Read payload bytes straight into their place: the user's array, or the part buffer.
size_t Connection::read_payload(size_t budget) {
    const size_t left = std::min<size_t>(frame_->length - filled_, budget);
    size_t taken = 0;
    if (sink_.consume) {
        uint8_t* part = part_buffer_.data() + part_filled_;
        taken = link_.stream->recv(part, std::min(left, part_bytes - part_filled_));
        filled_ += taken;
        part_filled_ += taken;
        if (part_filled_ == part_bytes || filled_ == frame_->length) {
            sink_.consume(part_buffer_.data(), filled_ - part_filled_, part_filled_);
            part_filled_ = 0;
        }
        return taken;
    }
    uint8_t* target = (sink_.buffer ? sink_.buffer : payload_.data()) + filled_;
    taken = link_.stream->recv(target, left);
    filled_ += taken;
    return taken;
}

// The state is reset before `complete` is called, which may end the group and throw.
void Connection::finish() {
    Sink sink = std::move(sink_);
    sink_ = {};
    frame_.reset();
    filled_ = 0;
    sink.complete(sink.buffer ? sink.buffer : payload_.data());
}

void Connection::free_slot(int32_t tag) {
    const auto slot = static_cast<uint32_t>(tag);
    if (slot >= link_.memory.num_slots() ||
        std::find(slots_.begin(), slots_.end(), slot) != slots_.end()) {
        throw ProtocolError("link-memory slot " + std::to_string(tag) +
                            " was freed, which is not in use");
    }
    slots_.push_back(slot);
}

}  // namespace potluck
