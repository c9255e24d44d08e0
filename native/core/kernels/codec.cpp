#include "core/kernels/codec.hpp"

#include <algorithm>
#include <cstring>

#include "core/kernels/kernels.hpp"

namespace potluck {

namespace {

const Half& half(Codec codec) {
    return codec == Codec::fp16 ? kernels().float16 : kernels().bfloat16;
}

// The layout of int8: the float32 scales of all blocks, then the codes. `block` is called with the
// byte offsets of a block's scale, of its codes, and of its float32 values, and its length.
template <class Block>
void for_blocks(std::size_t count, Block&& block) {
    const std::size_t num_blocks = (count + int8_block - 1) / int8_block;
    for (std::size_t i = 0; i < num_blocks; ++i) {
        const std::size_t begin = i * int8_block;
        block(4 * i, 4 * num_blocks + begin, 4 * begin, std::min(int8_block, count - begin));
    }
}

void decode_blocks(DecodeBlock decode_one, void* target, const void* encoded, std::size_t count) {
    const char* from = static_cast<const char*>(encoded);
    char* to = static_cast<char*>(target);
    for_blocks(count, [&](std::size_t scale_at, std::size_t codes_at, std::size_t at, std::size_t n) {
        float scale;
        std::memcpy(&scale, from + scale_at, sizeof scale);
        decode_one(to + at, from + codes_at, scale, n);
    });
}

}  // namespace

std::size_t encoded_bytes(Codec codec, std::size_t count) {
    if (codec != Codec::int8) return 2 * count;
    return count + 4 * ((count + int8_block - 1) / int8_block);
}

void encode(Codec codec, void* encoded, const void* source, std::size_t count) {
    if (codec != Codec::int8) return half(codec).narrow(encoded, source, count);
    const EncodeBlock encode_one = kernels().encode_block;
    char* to = static_cast<char*>(encoded);
    const char* from = static_cast<const char*>(source);
    for_blocks(count, [&](std::size_t scale_at, std::size_t codes_at, std::size_t at, std::size_t n) {
        const float scale = encode_one(to + codes_at, from + at, n);
        std::memcpy(to + scale_at, &scale, sizeof scale);
    });
}

void decode(Codec codec, void* target, const void* encoded, std::size_t count) {
    if (codec != Codec::int8) return half(codec).widen(target, encoded, count);
    decode_blocks(kernels().decode_block, target, encoded, count);
}

void decode_accumulate(Codec codec, void* target, const void* encoded, std::size_t count) {
    if (codec != Codec::int8) return half(codec).widen_add(target, encoded, count);
    decode_blocks(kernels().decode_add_block, target, encoded, count);
}

void encode_with_residual(Codec codec, void* encoded, void* residual, const void* source,
                          std::size_t count) {
    encode(codec, encoded, source, count);
    // Strip by strip, so that decoded values need a small buffer, which stays in the L1 cache. A
    // strip of the source is read before the residual is written over it.
    constexpr std::size_t strip = 4 * int8_block;
    const char* codes = static_cast<const char*>(encoded);
    float decoded[strip];
    const std::size_t num_blocks = (count + int8_block - 1) / int8_block;
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        if (codec != Codec::int8) {
            half(codec).widen(decoded, codes + 2 * begin, n);
        } else {
            for (std::size_t i = 0; i < n; i += int8_block) {
                float scale;
                std::memcpy(&scale, codes + 4 * ((begin + i) / int8_block), sizeof scale);
                kernels().decode_block(decoded + i, codes + 4 * num_blocks + begin + i, scale,
                                       std::min(int8_block, n - i));
            }
        }
        kernels().subtract(decoded, static_cast<const char*>(source) + 4 * begin, n);
        std::memcpy(static_cast<char*>(residual) + 4 * begin, decoded, 4 * n);
    }
}

}  // namespace potluck
