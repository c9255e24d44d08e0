#include "core/loop/messages.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace potluck {

void Messages::check_deadlines(double now) {
    mailbox_.each_pending([&](const Operation* operation) {
        if (now < operation->deadline()) return;
        state_.fail(GroupFailure::Kind::overdue, -1, "", operation);
    });
}

double Messages::wakes_at() const {
    double soonest = std::numeric_limits<double>::infinity();
    mailbox_.each_pending(
        [&](const Operation* operation) { soonest = std::min(soonest, operation->deadline()); });
    return soonest;
}

// -- out

void Messages::send(SendingPtr sending) {
    sending->started = now_s();
    connections_.need({sending->peer});
    Frame frame = connections_.frame(Kind::eager, sending->channel, ++message_);
    frame.dtype = sending->dtype;
    frame.tag = sending->tag;
    sending->number = message_;
    mailbox_.sending[message_] = sending;
    if (!connections_.departed.empty()) {
        connections_.check_departed(*sending);
        if (state_.is_over()) return;
    }
    FlowControl& flow = connections_.flow(sending->peer);
    Outgoing outgoing;
    if (sending->nbytes <= eager_bytes && flow.has_credit(sending->nbytes)) {
        flow.sent(sending->nbytes);
        frame.length = static_cast<uint32_t>(sending->nbytes);
        outgoing.payload = sending->data;
        outgoing.sent = [this, sending] { end_send(sending); };
    } else {
        // RTS is sent even without credit: without it the receiver could not match the message, and
        // both would wait for ever. The bytes stay in the caller's array until the CTS. An RTS
        // costs the receiver a fixed amount, for which FlowControl::hold allows twice the limit.
        flow.sent(0);
        outgoing.owned = std::make_shared<std::vector<uint8_t>>(encode_rts(sending->nbytes));
        outgoing.payload = outgoing.owned->data();
        frame.kind = Kind::rts;
        frame.length = static_cast<uint32_t>(outgoing.owned->size());
    }
    outgoing.frame = frame;
    connections_.send_control(sending->peer, std::move(outgoing));
}

void Messages::on_cts(Connection& connection, const Frame& frame) {
    const auto found = mailbox_.sending.find(frame.sequence);
    if (found == mailbox_.sending.end() || found->second->peer != connection.rank() ||
        found->second->is_clear) {
        throw ProtocolError("a CTS for message #" + std::to_string(frame.sequence) +
                            ", which was not announced");
    }
    found->second->is_clear = true;
    mailbox_.cleared[connection.rank()].push_back(found->second);
    connections_.dirty.insert(connection.rank());
}

// Pieces need no credit: their receiver has asked for them (CTS) and has their memory.
bool Messages::next_outgoing(Connection& connection, Outgoing& outgoing) {
    const auto found = mailbox_.cleared.find(connection.rank());
    if (found == mailbox_.cleared.end() || found->second.empty()) return false;
    const SendingPtr sending = found->second.front();
    const uint64_t start = sending->offset;
    const uint64_t count = std::min(segment_bytes_, sending->nbytes - start);
    if (!connection.can_start(count)) return false;
    sending->offset += count;
    outgoing.frame = connections_.frame(Kind::piece, sending->channel, sending->number);
    outgoing.frame.segment = static_cast<uint32_t>(start / segment_bytes_);
    outgoing.frame.length = static_cast<uint32_t>(count);
    outgoing.frame.dtype = sending->dtype;
    outgoing.payload = sending->data + start;
    if (sending->offset == sending->nbytes) {
        found->second.pop_front();
        outgoing.sent = [this, sending] { end_send(sending); };
    }
    return true;
}

void Messages::end_send(const SendingPtr& sending) {
    if (mailbox_.sending.erase(sending->number) == 0) return;
    sending->ticket->finish(Ticket::State::done, now_s() - sending->started);
}

// -- in

void Messages::receive(ReceivingPtr receiving) {
    receiving->started = now_s();
    if (receiving->source >= 0) connections_.need({receiving->source});
    Arrived arrived;
    if (mailbox_.post(receiving, arrived)) {
        match(receiving, arrived);
    } else if (!connections_.departed.empty()) {
        connections_.check_departed(*receiving);
    }
}

// The sink of an eager message: memory of its own, because whether a receive matches it is decided
// when it has come completely.
Sink Messages::keep_eager(Connection& connection, const Frame& frame) {
    const int source = connection.rank();
    connections_.hold(source, frame.length);
    const std::shared_ptr<uint8_t[]> payload(new uint8_t[std::max<size_t>(1, frame.length)]);
    Sink sink;
    sink.buffer = payload.get();
    sink.complete = [this, source, frame, payload](const uint8_t*) {
        arrive({source, frame, frame.length, payload});
    };
    return sink;
}

void Messages::on_rts(Connection& connection, const Frame& frame, const uint8_t* payload) {
    const uint64_t nbytes = decode_rts(payload, frame.length);
    connections_.hold(connection.rank(), 0);
    arrive({connection.rank(), frame, nbytes, nullptr});
}

void Messages::arrive(Arrived arrived) {
    if (const ReceivingPtr receiving = mailbox_.arrive(arrived)) match(receiving, arrived);
}

void Messages::match(const ReceivingPtr& receiving, const Arrived& arrived) {
    receiving->matched = arrived.source;
    // The group ends in the next two cases. The receive goes back among the pending operations, so
    // that its ticket is finished with them.
    if (!fits(*receiving, arrived)) {
        mailbox_.posted.push_back(receiving);
        state_.disagree(GroupFailure::Kind::mismatch, arrived.source, *receiving, arrived.nbytes,
                        arrived.frame.dtype);
        return;
    }
    const std::pair<int, uint64_t> key(arrived.source, arrived.frame.sequence);
    if (!arrived.payload && mailbox_.receiving.count(key)) {
        mailbox_.posted.push_back(receiving);
        connections_.violated(
            arrived.source,
            "it announced message #" + std::to_string(key.second) + " again before it had sent it");
        return;
    }
    // The credit returns when the message is matched, not when it arrives: credit bounds the memory
    // of unexpected messages.
    connections_.release(arrived.source, arrived.payload ? arrived.nbytes : 0);
    if (arrived.payload) {
        if (arrived.nbytes > 0) {
            std::memcpy(receiving->data, arrived.payload.get(), arrived.nbytes);
        }
        end_receive(receiving);
        return;
    }
    mailbox_.receiving[key] = receiving;
    Outgoing outgoing;
    outgoing.frame = connections_.frame(Kind::cts, receiving->channel, arrived.frame.sequence);
    connections_.send_control(arrived.source, std::move(outgoing));
}

// The sink of a piece: its place in the receive's array. A piece that is not the next one is
// refused. The sum can't overflow: `offset` is at most `nbytes`, the size of an array in memory,
// and a frame has at most 16 MiB.
Sink Messages::route_piece(Connection& connection, const Frame& frame) {
    const std::pair<int, uint64_t> key(connection.rank(), frame.sequence);
    const auto found = mailbox_.receiving.find(key);
    if (found == mailbox_.receiving.end() || frame.segment != found->second->num_pieces ||
        found->second->offset + frame.length > found->second->nbytes) {
        throw ProtocolError("a piece of message #" + std::to_string(frame.sequence) +
                            " that is not due");
    }
    const ReceivingPtr receiving = found->second;
    Sink sink;
    sink.buffer = receiving->data + receiving->offset;
    sink.complete = [this, receiving, key, length = frame.length](const uint8_t*) {
        receiving->offset += length;
        ++receiving->num_pieces;
        if (receiving->offset < receiving->nbytes) return;
        mailbox_.receiving.erase(key);
        end_receive(receiving);
    };
    return sink;
}

void Messages::end_receive(const ReceivingPtr& receiving) {
    // The caller knows ranks by their place in the channel, the loop by their number in the group.
    const std::vector<int>& ranks = receiving->ranks;
    const auto place = std::find(ranks.begin(), ranks.end(), receiving->matched);
    receiving->ticket->finish(Ticket::State::done, now_s() - receiving->started,
                              static_cast<int>(place - ranks.begin()));
}

}  // namespace potluck
