#include "core/wire/msgpack_values.hpp"

#include <array>
#include <vector>

namespace potluck {

namespace {

enum class Kind : std::uint8_t { plain, key, list, map, extension, invalid };

// The first byte of a value: how many bytes follow it that hold its length (in bytes, or in
// items), how many more bytes it has whatever its length, and the length of the short forms.
struct Token {
    Kind kind;
    std::uint8_t length_bytes;
    std::uint8_t fixed_bytes;
    std::uint8_t length;
};

constexpr Token token_of(unsigned first) {
    const auto low = [&](unsigned mask) { return static_cast<std::uint8_t>(first & mask); };
    if (first <= 0x7F || first >= 0xE0) return {Kind::key, 0, 0, 0};         // small integers
    if (first <= 0x8F) return {Kind::map, 0, 0, low(0x0F)};
    if (first <= 0x9F) return {Kind::list, 0, 0, low(0x0F)};
    if (first <= 0xBF) return {Kind::key, 0, low(0x1F), 0};                  // short texts
    switch (first) {
        case 0xC0: case 0xC2: case 0xC3: return {Kind::key, 0, 0, 0};        // none, false, true
        case 0xC4: case 0xC5: case 0xC6:                                     // bytes
            return {Kind::plain, static_cast<std::uint8_t>(1 << (first - 0xC4)), 0, 0};
        case 0xC7: case 0xC8: case 0xC9:                                     // extensions
            return {Kind::extension, static_cast<std::uint8_t>(1 << (first - 0xC7)), 0, 0};
        case 0xCA: return {Kind::plain, 0, 4, 0};                            // floats
        case 0xCB: return {Kind::plain, 0, 8, 0};
        case 0xCC: case 0xCD: case 0xCE: case 0xCF:                          // integers
            return {Kind::key, 0, static_cast<std::uint8_t>(1 << (first - 0xCC)), 0};
        case 0xD0: case 0xD1: case 0xD2: case 0xD3:
            return {Kind::key, 0, static_cast<std::uint8_t>(1 << (first - 0xD0)), 0};
        case 0xD4: case 0xD5: case 0xD6: case 0xD7: case 0xD8:               // short extensions
            return {Kind::extension, 0, 0, static_cast<std::uint8_t>(1 << (first - 0xD4))};
        case 0xD9: case 0xDA: case 0xDB:                                     // texts
            return {Kind::key, static_cast<std::uint8_t>(1 << (first - 0xD9)), 0, 0};
        case 0xDC: case 0xDD:
            return {Kind::list, static_cast<std::uint8_t>(2 << (first - 0xDC)), 0, 0};
        case 0xDE: case 0xDF:
            return {Kind::map, static_cast<std::uint8_t>(2 << (first - 0xDE)), 0, 0};
        default: return {Kind::invalid, 0, 0, 0};                            // 0xC1
    }
}

constexpr std::array<Token, 256> tokens = [] {
    std::array<Token, 256> all{};
    for (unsigned first = 0; first < all.size(); ++first) all[first] = token_of(first);
    return all;
}();

constexpr std::uint8_t tuple_extension = 2;

// A container whose values are being read.
struct Open {
    std::uint64_t left;  // keys and values that are still to come
    std::size_t end;     // where it must end, for a tuple; 0 for lists and maps
    bool is_map;
};

}  // namespace

std::int64_t count_values(const std::uint8_t* text, std::size_t size, std::int64_t most,
                          std::size_t max_depth) {
    std::vector<Open> open;
    std::size_t at = 0;
    std::size_t depth = 0;  // a tuple is an extension with a list in it, which counts once
    std::int64_t count = 0;
    bool is_first = true;
    for (;;) {
        while (!open.empty() && open.back().left == 0) {
            if (open.back().end == 0) --depth;
            else if (open.back().end != at) return payload_torn;
            open.pop_back();
        }
        if (open.empty() && !is_first) return at == size ? count : payload_torn;
        is_first = false;
        if (count > most) return count;
        if (at == size) return payload_torn;
        const Token token = tokens[text[at]];
        const bool is_key = !open.empty() && open.back().is_map && open.back().left % 2 == 0;
        if (token.kind == Kind::invalid) return payload_torn;
        if (is_key && token.kind != Kind::key) return payload_bad_key;
        const bool in_tuple = !open.empty() && open.back().end != 0;
        if (in_tuple && token.kind != Kind::list) return payload_torn;
        if (!open.empty()) --open.back().left;
        ++count;
        ++at;
        std::uint64_t length = token.length;
        if (token.length_bytes > size - at) return payload_torn;
        if (token.length_bytes > 0) {
            for (std::size_t each = 0; each < token.length_bytes; ++each)
                length = length << 8 | text[at + each];
            at += token.length_bytes;
        }
        switch (token.kind) {
            case Kind::list:
            case Kind::map: {
                if (++depth > max_depth) return payload_too_deep;
                const bool is_map = token.kind == Kind::map;
                open.push_back({is_map ? 2 * length : length, 0, is_map});
                break;
            }
            case Kind::extension: {
                if (length + 1 > size - at) return payload_torn;
                const bool is_tuple = text[at++] == tuple_extension;
                const std::size_t end = at + static_cast<std::size_t>(length);
                if (is_tuple) open.push_back({1, end, false});
                else at = end;
                break;
            }
            default: {
                const std::uint64_t bytes = token.fixed_bytes + length;
                if (bytes > size - at) return payload_torn;
                at += static_cast<std::size_t>(bytes);
            }
        }
    }
}

}  // namespace potluck
