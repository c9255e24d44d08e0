// Codecs: lossy encodings of float32 on the wire. The twins, and the formats, are in
// src/potluck/codecs/.
//
// Pointers need no alignment. Encoded bytes and decoded values equal those of the twins bit for
// bit, except for the payload of a NaN.
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

// Numbered as in src/potluck/codecs/.
enum class Codec : std::uint8_t { fp16 = 1, bf16 = 2, int8 = 3, int4 = 4, int2 = 5 };
constexpr int num_codecs = 6;  // code 0 is none

constexpr std::size_t block_elements = 256;  // of the integer codecs

// Bytes that `count` elements take when encoded.
std::size_t encoded_bytes(Codec codec, std::size_t count);

// encoded = encode(source), `count` float32 elements; the memories must not overlap. False if what
// it stands for has inf or NaN.
bool encode(Codec codec, void* encoded, const void* source, std::size_t count);

// target = decode(encoded), float32.
void decode(Codec codec, void* target, const void* encoded, std::size_t count);

// target += decode(encoded), float32. Rounded after the multiplication and again after the addition
// (no fused multiply-add), so that the result is the same on every processor.
void decode_accumulate(Codec codec, void* target, const void* encoded, std::size_t count);

// Error feedback, in one pass: encoded = encode(source + residual), residual = what that loses, and
// zero where the loss is not finite. False as above.
bool encode_with_residual(Codec codec, void* encoded, void* residual, const void* source,
                          std::size_t count);

}  // namespace potluck
