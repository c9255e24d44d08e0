// CRC-32C (the Castagnoli polynomial, as in iSCSI and ext4), by the best instructions that the
// processor has. The twin: src/potluck/wire/checksum.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

// The checksum of `count` bytes; `crc` is the checksum of what came before them (0: nothing).
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t count);

// The same by the crc32 instruction alone (without carry-less multiplication), where there is one.
std::uint32_t crc32c_lanes(std::uint32_t crc, const void* data, std::size_t count);

// The same by tables ("slicing by 8"), on every processor: the oracle of the tests.
std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t count);

}  // namespace potluck
