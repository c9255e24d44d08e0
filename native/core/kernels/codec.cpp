#include "core/kernels/codec.hpp"

#include <algorithm>
#include <cstring>

#include "core/kernels/kernels.hpp"

namespace potluck {

namespace {

bool is_half(Codec codec) { return codec == Codec::fp16 || codec == Codec::bf16; }

const Half& half(Codec codec) {
    return codec == Codec::fp16 ? kernels().float16 : kernels().bfloat16;
}

std::size_t bits_of(Codec codec) {
    return codec == Codec::int8 ? 8 : codec == Codec::int4 ? 4 : 2;
}

std::size_t num_blocks(std::size_t count) { return (count + block_elements - 1) / block_elements; }

const Pack& packing(Codec codec) {
    return codec == Codec::int4 ? kernels().pack4 : kernels().pack2;
}

// The layout of integers: the float32 scales of all blocks, then the codes. A block of an encoding
// of `count` elements that begins with element `begin`, which is a multiple of block_elements:
struct Place {
    std::size_t scale, codes;  // byte offsets
};

Place place_of(Codec codec, std::size_t count, std::size_t begin) {
    return {4 * (begin / block_elements), 4 * num_blocks(count) + begin * bits_of(codec) / 8};
}

// Encode `n` elements, which are those from `begin` on of an encoding of `count`. One of its strips
// begins at a multiple of block_elements and ends at one, or at `count`.
void encode_part(Codec codec, char* encoded, std::size_t count, std::size_t begin,
                 const char* values, std::size_t n) {
    if (is_half(codec)) return half(codec).narrow(encoded + 2 * begin, values, n);
    const float levels = static_cast<float>((1 << (bits_of(codec) - 1)) - 1);
    for (std::size_t i = 0; i < n; i += block_elements) {
        const std::size_t size = std::min(block_elements, n - i);
        const Place place = place_of(codec, count, begin + i);
        float scale;
        if (codec == Codec::int8) {
            scale = kernels().encode_block(encoded + place.codes, values + 4 * i, size, levels);
        } else {
            char codes[block_elements];
            scale = kernels().encode_block(codes, values + 4 * i, size, levels);
            packing(codec).pack(encoded + place.codes, codes, size);
        }
        std::memcpy(encoded + place.scale, &scale, sizeof scale);
    }
}

// The inverse; `decode_one` sets or adds.
void decode_part(Codec codec, DecodeBlock decode_one, char* target, const char* encoded,
                 std::size_t count, std::size_t begin, std::size_t n) {
    for (std::size_t i = 0; i < n; i += block_elements) {
        const std::size_t size = std::min(block_elements, n - i);
        const Place place = place_of(codec, count, begin + i);
        float scale;
        std::memcpy(&scale, encoded + place.scale, sizeof scale);
        if (codec == Codec::int8) {
            decode_one(target + 4 * i, encoded + place.codes, scale, size);
        } else {
            char codes[block_elements];
            packing(codec).unpack(codes, encoded + place.codes, size);
            decode_one(target + 4 * i, codes, scale, size);
        }
    }
}

// Whether the values that `n` encoded elements stand for, those from `begin` on, are finite.
bool is_finite(Codec codec, const char* encoded, std::size_t count, std::size_t begin,
               std::size_t n) {
    if (is_half(codec)) {
        // All bits of the exponent are set in inf and NaN only.
        const std::uint16_t exponent = codec == Codec::fp16 ? 0x7C00 : 0x7F80;
        std::uint16_t found = 0;
        for (std::size_t i = begin; i < begin + n; ++i) {
            std::uint16_t word;
            std::memcpy(&word, encoded + 2 * i, sizeof word);
            found |= (word & exponent) == exponent;
        }
        return !found;
    }
    bool finite = true;
    for (std::size_t i = begin; i < begin + n; i += block_elements) {
        float scale;  // NaN for a block with such a value
        std::memcpy(&scale, encoded + place_of(codec, count, i).scale, sizeof scale);
        finite &= scale == scale;
    }
    return finite;
}

// Arrays are encoded strip by strip: sums, decoded values and the look for infinities stay in the
// L1 cache, and memory is read and written once.
constexpr std::size_t strip = 4 * block_elements;

}  // namespace

std::size_t encoded_bytes(Codec codec, std::size_t count) {
    if (is_half(codec)) return 2 * count;
    return 4 * num_blocks(count) + (count * bits_of(codec) + 7) / 8;
}

bool encode(Codec codec, void* encoded, const void* source, std::size_t count) {
    char* const to = static_cast<char*>(encoded);
    const char* const from = static_cast<const char*>(source);
    bool finite = true;
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        encode_part(codec, to, count, begin, from + 4 * begin, n);
        finite &= is_finite(codec, to, count, begin, n);
    }
    return finite;
}

void decode(Codec codec, void* target, const void* encoded, std::size_t count) {
    if (is_half(codec)) return half(codec).widen(target, encoded, count);
    decode_part(codec, kernels().decode_block, static_cast<char*>(target),
                static_cast<const char*>(encoded), count, 0, count);
}

void decode_accumulate(Codec codec, void* target, const void* encoded, std::size_t count) {
    if (is_half(codec)) return half(codec).widen_add(target, encoded, count);
    decode_part(codec, kernels().decode_add_block, static_cast<char*>(target),
                static_cast<const char*>(encoded), count, 0, count);
}

bool encode_with_residual(Codec codec, void* encoded, void* residual, const void* source,
                          std::size_t count) {
    bool finite = true;
    const Combine add = kernels().combine[static_cast<int>(Dtype::float32)][static_cast<int>(Op::sum)];
    char* const to = static_cast<char*>(encoded);
    float sent[strip], decoded[strip];
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        char* const left = static_cast<char*>(residual) + 4 * begin;
        add(sent, left, static_cast<const char*>(source) + 4 * begin, n);
        encode_part(codec, to, count, begin, reinterpret_cast<const char*>(sent), n);
        if (is_half(codec)) {
            half(codec).widen(decoded, to + 2 * begin, n);
        } else {
            decode_part(codec, kernels().decode_block, reinterpret_cast<char*>(decoded), to, count,
                        begin, n);
        }
        kernels().keep_lost(left, sent, decoded, n);
        finite &= is_finite(codec, to, count, begin, n);
    }
    return finite;
}

}  // namespace potluck
