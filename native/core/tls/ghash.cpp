#include "core/tls/ghash.hpp"

#ifdef POTLUCK_GHASH

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "core/kernels/cpu.hpp"

#define POTLUCK_VECTORS \
    __attribute__((target("avx2,pclmul,avx512f,avx512bw,avx512dq,avx512vl,vpclmulqdq")))

namespace potluck {

namespace {

// GCM numbers the bits of a block from the most significant bit of its first byte. With the bytes
// reversed, a carry-less product of two blocks is theirs, but one bit too far right; so one factor,
// the key, is stored times x. The polynomial x^128 + x^7 + x^2 + x + 1 of the field, in that order:
constexpr uint64_t polynomial = 0xc200000000000000;

POTLUCK_VECTORS inline __m128i reversed(__m128i block) {
    return _mm_shuffle_epi8(
        block, _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

// A product of 256 bits in three parts of 128, the middle one 64 bits further up than `low`.
struct Product {
    __m128i low, middle, high;
};

// The product modulo the polynomial: from the low end, 64 bits at a time.
POTLUCK_VECTORS inline __m128i reduced(Product product) {
    const __m128i by = _mm_set_epi64x(static_cast<long long>(polynomial), 1);
    auto [low, middle, high] = product;
    middle = _mm_xor_si128(middle, _mm_xor_si128(_mm_shuffle_epi32(low, 0x4e),
                                                 _mm_clmulepi64_si128(by, low, 0x01)));
    return _mm_xor_si128(high, _mm_xor_si128(_mm_shuffle_epi32(middle, 0x4e),
                                             _mm_clmulepi64_si128(by, middle, 0x01)));
}

POTLUCK_VECTORS inline __m128i times(__m128i a, __m128i b) {
    const __m128i middle =
        _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x01), _mm_clmulepi64_si128(a, b, 0x10));
    return reduced({_mm_clmulepi64_si128(a, b, 0x00), middle, _mm_clmulepi64_si128(a, b, 0x11)});
}

POTLUCK_VECTORS inline __m128i folded(__m512i vector) {
    const __m256i half =
        _mm256_xor_si256(_mm512_castsi512_si256(vector), _mm512_extracti64x4_epi64(vector, 1));
    return _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

}  // namespace

bool Ghash::is_available() {
    static const bool can = cpu().avx512 && __builtin_cpu_supports("vpclmulqdq") &&
                            __builtin_cpu_supports("pclmul");
    return can;
}

Ghash::~Ghash() {
    volatile uint8_t* secret = powers_.data();
    for (size_t index = 0; index < powers_.size(); ++index) secret[index] = 0;
}

POTLUCK_VECTORS void Ghash::set_key(const Block& key) {
    uint64_t low = 0, high = 0;
    for (size_t index = 0; index < 8; ++index) {
        high = high << 8 | key[index];
        low = low << 8 | key[8 + index];
    }
    // Times x, without a branch on the bit that leaves.
    const uint64_t leaves = 0 - (high >> 63);
    high = high << 1 | low >> 63;
    low = low << 1;
    high ^= leaves & polynomial;
    low ^= leaves & 1;
    const __m128i first = _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
    __m128i power = first;
    for (size_t index = at_once; index-- > 0;) {
        _mm_store_si128(reinterpret_cast<__m128i*>(powers_.data() + index * block_bytes), power);
        power = times(power, first);
    }
}

void Ghash::begin() {
    sum_.fill(0);
    num_partial_ = 0;
    num_bytes_ = 0;
}

void Ghash::add(const uint8_t* data, size_t count) {
    num_bytes_ += count;
    if (num_partial_ > 0) {
        const size_t part = std::min(count, block_bytes - num_partial_);
        std::memcpy(partial_.data() + num_partial_, data, part);
        num_partial_ += part;
        data += part;
        count -= part;
        if (num_partial_ < block_bytes) return;
        blocks(partial_.data(), 1);
    }
    blocks(data, count / block_bytes);
    num_partial_ = count % block_bytes;
    if (num_partial_ > 0) std::memcpy(partial_.data(), data + count - num_partial_, num_partial_);
}

Ghash::Block Ghash::end() {
    if (num_partial_ > 0) {
        std::fill(partial_.begin() + static_cast<std::ptrdiff_t>(num_partial_), partial_.end(), 0);
        blocks(partial_.data(), 1);
    }
    Block length{};
    for (size_t index = 0; index < 8; ++index) {
        length[index] = static_cast<uint8_t>((8 * num_bytes_) >> (56 - 8 * index));
    }
    blocks(length.data(), 1);
    Block hash;
    std::reverse_copy(sum_.begin(), sum_.end(), hash.begin());
    return hash;
}

// sum = (sum + block) * H for each block; of 16 blocks at once: (sum + b1) * H^16 + ... + b16 * H.
POTLUCK_VECTORS void Ghash::blocks(const uint8_t* data, size_t num) {
    __m128i sum = _mm_load_si128(reinterpret_cast<const __m128i*>(sum_.data()));
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (; num >= at_once; num -= at_once, data += at_once * block_bytes) {
        __m512i low = _mm512_setzero_si512(), middle = low, high = low;
        for (size_t at = 0; at < at_once * block_bytes; at += 64) {
            __m512i four = _mm512_shuffle_epi8(_mm512_loadu_si512(data + at), order);
            if (at == 0) four = _mm512_xor_si512(four, _mm512_zextsi128_si512(sum));
            const __m512i power = _mm512_load_si512(powers_.data() + at);
            low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128(four, power, 0x00));
            middle = _mm512_ternarylogic_epi64(middle, _mm512_clmulepi64_epi128(four, power, 0x01),
                                               _mm512_clmulepi64_epi128(four, power, 0x10), 0x96);
            high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128(four, power, 0x11));
        }
        sum = reduced({folded(low), folded(middle), folded(high)});
    }
    const __m128i key = _mm_load_si128(
        reinterpret_cast<const __m128i*>(powers_.data() + (at_once - 1) * block_bytes));
    for (; num > 0; --num, data += block_bytes) {
        const __m128i block = reversed(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
        sum = times(_mm_xor_si128(sum, block), key);
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(sum_.data()), sum);
}

}  // namespace potluck

#endif
