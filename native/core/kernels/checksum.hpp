// CRC-32C (Castagnoli), as in iSCSI and ext4. The twin: src/potluck/wire/checksum.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

// The checksum of `count` bytes; `crc` is the checksum of what came before them (0: nothing).
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t count);

// The same by the processor's crc32 instruction, where it has one: without wide multiplication.
std::uint32_t crc32c_lanes(std::uint32_t crc, const void* data, std::size_t count);

// The same without the processor's instructions: the oracle of the tests.
std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t count);

}  // namespace potluck
