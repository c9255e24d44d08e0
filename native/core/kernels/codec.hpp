// Encodings of float32 on the wire. The twins, and the formats: src/potluck/codecs/.
//
// Pointers need no alignment. Encoded bytes and decoded values are those of the twins, bit by bit,
// except which NaN a NaN is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

// Numbered as in src/potluck/codecs/.
enum class Codec : std::uint8_t { fp16 = 1, bf16 = 2, int8 = 3 };

constexpr std::size_t int8_block = 256;

// Bytes that `count` elements take when encoded.
std::size_t encoded_bytes(Codec codec, std::size_t count);

// encoded = encode(source), `count` float32 elements; the memories must not overlap.
void encode(Codec codec, void* encoded, const void* source, std::size_t count);

// target = decode(encoded), float32.
void decode(Codec codec, void* target, const void* encoded, std::size_t count);

// target += decode(encoded), float32, rounded after the multiplication and after the addition.
void decode_accumulate(Codec codec, void* target, const void* encoded, std::size_t count);

// encoded = encode(source) and residual = source - decode(encoded): what error feedback keeps.
// residual may be source.
void encode_with_residual(Codec codec, void* encoded, void* residual, const void* source,
                          std::size_t count);

}  // namespace potluck
