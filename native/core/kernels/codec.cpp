#include "core/kernels/codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

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

// The largest code of an integer codec.
float levels_of(Codec codec) { return static_cast<float>((1 << (bits_of(codec) - 1)) - 1); }

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
    const float levels = levels_of(codec);
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

// What a codec stands for: magnitudes from `limit` on would be encoded as infinity, or are at the
// end of float32's range, and become `largest`. Twins: `Codec.limit` and `Codec.largest`.
struct Range {
    float limit, largest;
};

Range range_of(Codec codec) {
    constexpr float most = std::numeric_limits<float>::max();
    if (codec == Codec::fp16) return {65520.0f, 65504.0f};
    if (codec == Codec::bf16) return {0x1.FFp127f, 0x1.FEp127f};
    return {most, most};
}

// Whether all of `n` encoded elements, those from `begin` on, are within the codec's range.
bool is_within(Codec codec, const char* encoded, std::size_t count, std::size_t begin,
               std::size_t n) {
    if (is_half(codec)) {
        return kernels().largest_half(encoded + 2 * begin, n) < (codec == Codec::fp16 ? 0x7C00 : 0x7F80);
    }
    // Just below the scale of a block with the largest number.
    const float most = range_of(codec).largest / levels_of(codec) * 0.999999f;
    bool within = true;
    for (std::size_t i = begin; i < begin + n; i += block_elements) {
        float scale;  // NaN for a block with inf or NaN
        std::memcpy(&scale, encoded + place_of(codec, count, i).scale, sizeof scale);
        within &= scale < most;
    }
    return within;
}

// Encode once more a strip that is not within the range. `values` are a copy of its elements, or
// the sums of `a` and `b`; returns how many are beyond the range.
std::size_t encode_saturated(Codec codec, char* encoded, std::size_t count, std::size_t begin,
                             float* values, const char* a, const char* b, std::size_t n) {
    const Range range = range_of(codec);
    std::size_t num_beyond = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (std::abs(values[i]) < range.limit) continue;
        ++num_beyond;
        float left, right;
        std::memcpy(&left, a + 4 * i, sizeof left);
        std::memcpy(&right, b + 4 * i, sizeof right);
        if (std::isfinite(left) && std::isfinite(right)) {
            values[i] = std::copysign(range.largest, values[i]);
        }
    }
    encode_part(codec, encoded, count, begin, reinterpret_cast<const char*>(values), n);
    return num_beyond;
}

// A sum of finite values is beyond float32's range only if one of them is at least half of the last
// place of the largest number, 2^103. So sums are looked at only where what is decoded is that large.
constexpr float harmless = 0x1p103f;

void add_saturating(void* target, const float* values, std::size_t n) {
    char* const to = static_cast<char*>(target);
    for (std::size_t i = 0; i < n; ++i) {
        float mine;
        std::memcpy(&mine, to + 4 * i, sizeof mine);
        float sum = mine + values[i];
        if (std::isinf(sum) && std::isfinite(mine) && std::isfinite(values[i])) {
            sum = std::copysign(std::numeric_limits<float>::max(), sum);
        }
        std::memcpy(to + 4 * i, &sum, sizeof sum);
    }
}

bool are_finite(const float* values, std::size_t n) {
    std::int32_t largest = 0;  // of the magnitudes as integers, which have the order of their values
    for (std::size_t i = 0; i < n; ++i) {
        std::int32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        largest = std::max(largest, bits & 0x7FFFFFFF);
    }
    return largest < 0x7F800000;
}

void decode_add_block(void* target, const void* codes, float scale, std::size_t n) {
    if (scale < harmless / 128) return kernels().decode_add_block(target, codes, scale, n);
    float values[block_elements];
    kernels().decode_block(values, codes, scale, n);
    add_saturating(target, values, n);
}

// Arrays are encoded strip by strip: sums, decoded values and the look for infinities stay in the
// L1 cache, and memory is read and written once.
constexpr std::size_t strip = 4 * block_elements;

}  // namespace

std::size_t encoded_bytes(Codec codec, std::size_t count) {
    if (is_half(codec)) return 2 * count;
    return 4 * num_blocks(count) + (count * bits_of(codec) + 7) / 8;
}

std::size_t encode(Codec codec, void* encoded, const void* source, std::size_t count) {
    char* const to = static_cast<char*>(encoded);
    std::size_t num_beyond = 0;
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        const char* const from = static_cast<const char*>(source) + 4 * begin;
        encode_part(codec, to, count, begin, from, n);
        if (is_within(codec, to, count, begin, n)) continue;
        float values[strip];
        std::memcpy(values, from, 4 * n);
        num_beyond += encode_saturated(codec, to, count, begin, values, from, from, n);
    }
    return num_beyond;
}

void decode(Codec codec, void* target, const void* encoded, std::size_t count) {
    if (is_half(codec)) return half(codec).widen(target, encoded, count);
    decode_part(codec, kernels().decode_block, static_cast<char*>(target),
                static_cast<const char*>(encoded), count, 0, count);
}

void decode_accumulate(Codec codec, void* target, const void* encoded, std::size_t count) {
    char* const to = static_cast<char*>(target);
    const char* const from = static_cast<const char*>(encoded);
    if (codec == Codec::fp16) return kernels().float16.widen_add(to, from, count);
    if (codec != Codec::bf16) return decode_part(codec, decode_add_block, to, from, count, 0, count);
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        if (kernels().largest_half(from + 2 * begin, n) < 0x7300) {  // 2^103
            kernels().bfloat16.widen_add(to + 4 * begin, from + 2 * begin, n);
            continue;
        }
        float values[strip];
        kernels().bfloat16.widen(values, from + 2 * begin, n);
        add_saturating(to + 4 * begin, values, n);
    }
}

void accumulate(void* target, const void* source, std::size_t count) {
    const Combine add = kernels().combine[static_cast<int>(Dtype::float32)][static_cast<int>(Op::sum)];
    float sums[strip], values[strip];
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        char* const to = static_cast<char*>(target) + 4 * begin;
        const char* const from = static_cast<const char*>(source) + 4 * begin;
        add(sums, to, from, n);
        if (are_finite(sums, n)) {
            std::memcpy(to, sums, 4 * n);
        } else {
            std::memcpy(values, from, 4 * n);
            add_saturating(to, values, n);
        }
    }
}

std::size_t encode_with_residual(Codec codec, void* encoded, void* residual, const void* source,
                                 std::size_t count) {
    std::size_t num_beyond = 0;
    const Combine add = kernels().combine[static_cast<int>(Dtype::float32)][static_cast<int>(Op::sum)];
    char* const to = static_cast<char*>(encoded);
    float sent[strip], decoded[strip];
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        char* const left = static_cast<char*>(residual) + 4 * begin;
        const char* const from = static_cast<const char*>(source) + 4 * begin;
        add(sent, left, from, n);
        encode_part(codec, to, count, begin, reinterpret_cast<const char*>(sent), n);
        if (!is_within(codec, to, count, begin, n)) {
            num_beyond += encode_saturated(codec, to, count, begin, sent, left, from, n);
        }
        if (is_half(codec)) {
            half(codec).widen(decoded, to + 2 * begin, n);
        } else {
            decode_part(codec, kernels().decode_block, reinterpret_cast<char*>(decoded), to, count,
                        begin, n);
        }
        kernels().keep_lost(left, sent, decoded, n);
    }
    return num_beyond;
}

}  // namespace potluck
