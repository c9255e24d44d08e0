// Point-to-point messages on their way: announced, granted, sent in pieces. The twin of
// engine/loop/messages.py. Who gets a message is decided in mailbox.hpp.
#pragma once

#include <cstdint>

#include "core/loop/mailbox.hpp"
#include "core/loop/ports.hpp"

namespace potluck {

class Messages {
public:
    Messages(Fate& fate, Ports& ports, uint64_t segment_bytes)
        : fate_(fate), ports_(ports), segment_bytes_(segment_bytes) {}

    const Mailbox& mailbox() const { return mailbox_; }

    void check_deadlines(double now);
    // When check_deadlines has something to do; infinity if never.
    double wakes_at() const;

    // -- out

    void send(SendingPtr sending);
    void on_grant(Port& port, const Frame& frame);
    // The next piece of a granted message that may go over this link; false if there is none.
    bool next_outgoing(Port& port, Outgoing& outgoing);

    // -- in

    void receive(ReceivingPtr receiving);
    Sink keep_eager(Port& port, const Frame& frame);
    void on_request(Port& port, const Frame& frame, const uint8_t* payload);
    Sink route_piece(Port& port, const Frame& frame);

private:
    void end_send(const SendingPtr& sending);
    void end_receive(const ReceivingPtr& receiving);
    void arrive(Arrived arrived);
    void match(const ReceivingPtr& receiving, const Arrived& arrived);

    Fate& fate_;
    Ports& ports_;
    const uint64_t segment_bytes_;
    Mailbox mailbox_;
    uint64_t message_ = 0;
};

}  // namespace potluck
