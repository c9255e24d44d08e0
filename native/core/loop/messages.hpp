// The transfer of point-to-point messages: eager, or rendezvous (RTS, CTS, then pieces). The twin
// of engine/loop/messages.py. Which receive a message goes to is decided in mailbox.hpp.
#pragma once

#include <cstdint>

#include "core/loop/mailbox.hpp"
#include "core/loop/connections.hpp"

namespace potluck {

class Messages {
public:
    Messages(GroupState& state, Connections& connections, uint64_t segment_bytes)
        : state_(state), connections_(connections), segment_bytes_(segment_bytes) {}

    const Mailbox& mailbox() const { return mailbox_; }

    void check_deadlines(double now);
    // When check_deadlines has something to do; infinity if never.
    double wakes_at() const;

    // -- out

    void send(SendingPtr sending);
    void on_cts(Connection& connection, const Frame& frame);
    // The next piece of a cleared message for this link; false if there is none that can start.
    bool next_outgoing(Connection& connection, Outgoing& outgoing);

    // -- in

    void receive(ReceivingPtr receiving);
    Sink keep_eager(Connection& connection, const Frame& frame);
    void on_rts(Connection& connection, const Frame& frame, const uint8_t* payload);
    Sink route_piece(Connection& connection, const Frame& frame);

private:
    void end_send(const SendingPtr& sending);
    void end_receive(const ReceivingPtr& receiving);
    void arrive(Arrived arrived);
    void match(const ReceivingPtr& receiving, const Arrived& arrived);

    GroupState& state_;
    Connections& connections_;
    const uint64_t segment_bytes_;
    Mailbox mailbox_;
    uint64_t message_ = 0;  // number of the last message sent; 0: none
};

}  // namespace potluck
