// The frame: the header of 48 bytes that precedes every payload between two ranks. The twin of
// wire/frames.py, where each field is explained. The bounds of payloads are the same there, and are
// checked before memory is taken, because the bytes come from another machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace potluck {

// The peer sent bytes that potluck would not have sent.
struct ProtocolError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Kind : uint8_t {
    data = 1,
    eager = 2,
    rts = 3,
    cts = 4,
    piece = 5,
    slot_free = 6,
    abort = 7,
    close = 8,
    close_ack = 9,
    hang_query = 10,
    hang_report = 11,
    credit = 12,
    begun = 13,
};

constexpr uint8_t protocol_version = 1;
constexpr size_t frame_bytes = 48;
constexpr uint32_t max_payload = 16 * 1024 * 1024;  // of DATA and PIECE
constexpr uint32_t eager_bytes = 64 * 1024;         // messages up to this size are sent eagerly
constexpr uint32_t max_control = 16 * 1024;         // payload of RTS and ABORT
constexpr uint8_t in_link_memory = 1;               // flag: the payload is in slot `tag`

struct Frame {
    Kind kind{};
    uint32_t epoch = 0;
    uint32_t channel = 0;
    uint32_t chunk = 0;
    uint64_t sequence = 0;
    uint32_t segment = 0;
    uint32_t length = 0;
    uint64_t fingerprint = 0;
    uint16_t source = 0;
    uint8_t dtype = 0;
    uint8_t flags = 0;
    int32_t tag = 0;
};

const char* name_of(Kind kind);

// The most payload that a frame of this kind may announce.
uint32_t bound_of(Kind kind);

// Write the 48 bytes of a frame.
void encode(const Frame& frame, uint8_t* header);

// The frame in 48 bytes; ProtocolError on anything potluck would not have sent.
Frame decode(const uint8_t* header);

// The payload of an RTS frame: the size of the message (msgpack, one field). The size is what the
// peer claims; it is compared with the receive's array, and no memory is taken for it.
std::vector<uint8_t> encode_rts(uint64_t nbytes);
uint64_t decode_rts(const uint8_t* body, size_t length);

}  // namespace potluck
