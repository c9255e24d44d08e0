// Codecs: lossy encodings of float32 on the wire. The twins, and the formats, are in
// src/potluck/_core/codecs/.
//
// A finite value, or a sum of finite values, beyond the range becomes the largest number of its sign.
// Infinities and NaN stay what they are: in an integer codec their whole block decodes to NaN.
//
// Pointers need no alignment. Encoded bytes and decoded values equal those of the twins bit for
// bit, except for the payload of a NaN.
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

// Numbered as in src/potluck/_core/codecs/.
enum class Codec : std::uint8_t { fp16 = 1, bf16 = 2, int8 = 3, int4 = 4, int2 = 5 };
constexpr int num_codecs = 6;  // code 0 is none

constexpr std::size_t block_elements = 256;  // of the integer codecs

// Bytes that `count` elements take when encoded.
std::size_t encoded_bytes(Codec codec, std::size_t count);

// encoded = encode(source), `count` float32 elements; the memories must not overlap. Returns how many
// elements are beyond the codec's range: inf, NaN, and those in whose place is the largest number.
std::size_t encode(Codec codec, void* encoded, const void* source, std::size_t count);

// target = decode(encoded), float32.
void decode(Codec codec, void* target, const void* encoded, std::size_t count);

// target += decode(encoded), float32, saturating. Rounded after the multiplication and again after the addition
// (no fused multiply-add), so that the result is the same on every processor.
void decode_accumulate(Codec codec, void* target, const void* encoded, std::size_t count);

// target += source, float32, saturating: how sums are made that are encoded later.
void accumulate(void* target, const void* source, std::size_t count);

// Error feedback, in one pass: encoded = encode(source + residual), residual = what that loses, and
// zero where the loss is not finite. What is beyond the range is not in it. Returns the same.
std::size_t encode_with_residual(Codec codec, void* encoded, void* residual, const void* source,
                                 std::size_t count);

}  // namespace potluck
