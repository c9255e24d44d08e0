#include "core/loop/frame.hpp"

#include <cstdio>
#include <cstring>

namespace potluck {

namespace {

// Little-endian by shifts, so that the layout depends neither on the processor nor on alignment;
// compilers make one store or load of it.
template <typename T>
uint8_t* put(uint8_t* at, T value) {
    for (size_t index = 0; index < sizeof(T); ++index) {
        at[index] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * index));
    }
    return at + sizeof(T);
}

template <typename T>
const uint8_t* get(const uint8_t* at, T& value) {
    uint64_t bits = 0;
    for (size_t index = 0; index < sizeof(T); ++index) {
        bits |= static_cast<uint64_t>(at[index]) << (8 * index);
    }
    value = static_cast<T>(bits);
    return at + sizeof(T);
}

std::string hex(unsigned value) {
    char text[16];
    std::snprintf(text, sizeof text, "%#x", value);
    return text;
}

// Bytes as Python's repr shows them: they come from a stranger, and go into an error's text.
std::string quoted(const uint8_t* bytes, size_t count) {
    std::string text = "b'";
    for (size_t index = 0; index < count; ++index) {
        const uint8_t byte = bytes[index];
        if (byte >= 0x20 && byte < 0x7f && byte != '\'' && byte != '\\') {
            text += static_cast<char>(byte);
        } else {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
            text += escaped;
        }
    }
    return text + "'";
}

}  // namespace

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::data: return "DATA";
        case Kind::eager: return "EAGER";
        case Kind::rts: return "RTS";
        case Kind::cts: return "CTS";
        case Kind::piece: return "PIECE";
        case Kind::slot_free: return "SLOT_FREE";
        case Kind::abort: return "ABORT";
        case Kind::close: return "CLOSE";
        case Kind::close_ack: return "CLOSE_ACK";
        case Kind::hang_query: return "HANG_QUERY";
        case Kind::hang_report: return "HANG_REPORT";
        case Kind::credit: return "CREDIT";
        case Kind::begun: return "BEGUN";
    }
    return "?";
}

uint32_t bound_of(Kind kind) {
    switch (kind) {
        case Kind::data:
        case Kind::piece: return max_payload;
        case Kind::eager: return eager_bytes;
        case Kind::rts:
        case Kind::abort: return max_control;
        default: return 0;
    }
}

void encode(const Frame& frame, uint8_t* at) {
    *at++ = 'P';
    *at++ = 'L';
    *at++ = protocol_version;
    *at++ = static_cast<uint8_t>(frame.kind);
    at = put(at, frame.epoch);
    at = put(at, frame.channel);
    at = put(at, frame.chunk);
    at = put(at, frame.sequence);
    at = put(at, frame.segment);
    at = put(at, frame.length);
    at = put(at, frame.fingerprint);
    at = put(at, frame.source);
    at = put(at, frame.dtype);
    at = put(at, frame.flags);
    put(at, static_cast<uint32_t>(frame.tag));
}

Frame decode(const uint8_t* header) {
    if (header[0] != 'P' || header[1] != 'L') {
        throw ProtocolError("not a potluck frame: it begins with " + quoted(header, 4));
    }
    if (header[2] != protocol_version) {
        throw ProtocolError("a frame of protocol " + std::to_string(header[2]) +
                            "; this is protocol " + std::to_string(protocol_version));
    }
    if (header[3] < static_cast<uint8_t>(Kind::data) ||
        header[3] > static_cast<uint8_t>(Kind::begun)) {
        throw ProtocolError("a frame of unknown kind " + std::to_string(header[3]));
    }
    Frame frame;
    frame.kind = static_cast<Kind>(header[3]);
    uint32_t tag = 0;
    const uint8_t* at = header + 4;
    at = get(at, frame.epoch);
    at = get(at, frame.channel);
    at = get(at, frame.chunk);
    at = get(at, frame.sequence);
    at = get(at, frame.segment);
    at = get(at, frame.length);
    at = get(at, frame.fingerprint);
    at = get(at, frame.source);
    at = get(at, frame.dtype);
    at = get(at, frame.flags);
    get(at, tag);
    frame.tag = static_cast<int32_t>(tag);
    const std::string name = name_of(frame.kind);
    if (frame.length > bound_of(frame.kind)) {
        throw ProtocolError("a " + name + " frame announces " + std::to_string(frame.length) +
                            " bytes; at most " + std::to_string(bound_of(frame.kind)) +
                            " are allowed");
    }
    if (frame.flags & ~in_link_memory) {
        throw ProtocolError("a frame with unknown flags " + hex(frame.flags));
    }
    if ((frame.flags & in_link_memory) && frame.kind != Kind::data && frame.kind != Kind::piece) {
        throw ProtocolError("a " + name + " frame whose payload lies in link memory");
    }
    return frame;
}

// {"nbytes": n} in msgpack: a map of one entry, a string of six bytes, an unsigned integer. Written
// in its widest form; read in all forms (positive fixint, uint 8 to uint 64), since the Python twin
// writes the shortest.

static const uint8_t rts_prefix[] = {0x81, 0xa6, 'n', 'b', 'y', 't', 'e', 's'};

std::vector<uint8_t> encode_rts(uint64_t nbytes) {
    std::vector<uint8_t> body(rts_prefix, rts_prefix + sizeof rts_prefix);
    body.push_back(0xcf);
    for (int shift = 56; shift >= 0; shift -= 8) {
        body.push_back(static_cast<uint8_t>(nbytes >> shift));
    }
    return body;
}

uint64_t decode_rts(const uint8_t* body, size_t length) {
    if (length > sizeof rts_prefix &&
        std::memcmp(body, rts_prefix, sizeof rts_prefix) == 0) {
        const uint8_t* at = body + sizeof rts_prefix;
        const size_t left = length - sizeof rts_prefix;
        const uint8_t type = *at++;
        if (type < 0x80 && left == 1) return type;
        size_t width = type == 0xcc ? 1 : type == 0xcd ? 2 : type == 0xce ? 4 : 8;
        if (type >= 0xcc && type <= 0xcf && left == 1 + width) {
            uint64_t value = 0;
            while (width-- > 0) value = value << 8 | *at++;
            return value;
        }
    }
    throw ProtocolError("not the payload of an RTS frame");
}

}  // namespace potluck
