// The check of a payload's header before it is decoded; the twin of src/potluck/_core/wire/msgpack_values.py,
// which says what is checked and why.
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

// What `count_values` returns for a text that is no payload; the names stand in msgpack_values.py.
constexpr std::int64_t payload_torn = -1;
constexpr std::int64_t payload_too_deep = -2;
constexpr std::int64_t payload_bad_key = -3;

// The number of values in the `size` bytes at `text`, or one of the codes above. Ends with
// `most + 1` when there are more. Reads each byte at most once.
std::int64_t count_values(const std::uint8_t* text, std::size_t size, std::int64_t most,
                          std::size_t max_depth);

}  // namespace potluck
