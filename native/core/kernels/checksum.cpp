#include "core/kernels/checksum.hpp"

#include <array>
#include <cstring>

#include "core/kernels/cpu.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#if defined(__clang__)  // there sse4.2 does not imply the feature crc32
#define POTLUCK_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#define POTLUCK_FOLD_TARGET \
    __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2,crc32")))
#else
#define POTLUCK_FOLD_TARGET __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))
#define POTLUCK_CRC_TARGET __attribute__((target("sse4.2")))
#endif
#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_acle.h>
#if defined(__clang__)
#define POTLUCK_CRC_TARGET __attribute__((target("crc")))
#else
#define POTLUCK_CRC_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace potluck {

namespace {

constexpr std::uint32_t polynomial = 0x82f63b78;  // bit-reflected

using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: the change of the register by byte b, k bytes later.
constexpr std::array<Table, 8> make_tables() {
    std::array<Table, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? polynomial : 0);
        tables[0][byte] = value;
    }
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        for (int k = 1; k < 8; ++k) {
            const std::uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
        }
    }
    return tables;
}

constexpr std::array<Table, 8> tables = make_tables();

std::uint32_t by_byte(const unsigned char* data, std::size_t count, std::uint32_t state) {
    for (std::size_t i = 0; i < count; ++i) {
        state = (state >> 8) ^ tables[0][(state ^ data[i]) & 0xff];
    }
    return state;
}

#if defined(POTLUCK_CRC_TARGET)

// Advances the register over `bytes` zero bytes. That is linear over GF(2), so one table for each
// byte of the register gives it. Used to join the checksums of adjacent pieces.
using Shift = std::array<Table, 4>;

Shift make_shift(std::size_t bytes) {
    const std::array<unsigned char, 256> zeros{};
    Shift shift{};
    std::array<std::uint32_t, 32> images{};
    for (int bit = 0; bit < 32; ++bit) {
        std::uint32_t state = std::uint32_t{1} << bit;
        for (std::size_t left = bytes; left > 0;) {
            const std::size_t step = left < zeros.size() ? left : zeros.size();
            state = by_byte(zeros.data(), step, state);
            left -= step;
        }
        images[bit] = state;
    }
    for (int k = 0; k < 4; ++k) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            for (int bit = 0; bit < 8; ++bit) {
                if (byte >> bit & 1) shift[k][byte] ^= images[8 * k + bit];
            }
        }
    }
    return shift;
}

std::uint32_t apply(const Shift& shift, std::uint32_t state) {
    return shift[0][state & 0xff] ^ shift[1][state >> 8 & 0xff] ^ shift[2][state >> 16 & 0xff] ^
           shift[3][state >> 24];
}

POTLUCK_CRC_TARGET inline std::uint64_t step8(std::uint64_t state, const unsigned char* data) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
#if defined(__x86_64__)
    return _mm_crc32_u64(state, word);
#else
    return __crc32cd(static_cast<std::uint32_t>(state), word);
#endif
}

// The crc32 instruction has a latency of 3 cycles and a throughput of 1 per cycle, so three
// independent lanes of `lane` bytes are computed side by side and joined. Long lanes let the
// hardware prefetcher follow each of the three streams.
template <std::size_t lane>
POTLUCK_CRC_TARGET std::uint32_t by_lanes(const unsigned char*& data, std::size_t& count,
                                          std::uint32_t state) {
    static const Shift one = make_shift(lane);
    static const Shift two = make_shift(2 * lane);
    std::uint64_t a = state;
    while (count >= 3 * lane) {
        std::uint64_t b = 0, c = 0;
        for (std::size_t i = 0; i < lane; i += 8) {
            a = step8(a, data + i);
            b = step8(b, data + lane + i);
            c = step8(c, data + 2 * lane + i);
        }
        a = apply(two, static_cast<std::uint32_t>(a)) ^ apply(one, static_cast<std::uint32_t>(b)) ^ c;
        data += 3 * lane;
        count -= 3 * lane;
    }
    return static_cast<std::uint32_t>(a);
}

POTLUCK_CRC_TARGET std::uint32_t by_instruction(const unsigned char* data, std::size_t count,
                                                std::uint32_t state) {
    state = by_lanes<8192>(data, count, state);
    std::uint64_t a = by_lanes<1024>(data, count, state);
    for (; count >= 8; data += 8, count -= 8) a = step8(a, data);
    return by_byte(data, count, static_cast<std::uint32_t>(a));
}

bool has_instruction() {
    return cpu().sse42 || cpu().arm_crc32;
}

#endif

#if defined(POTLUCK_FOLD_TARGET)

// x^n modulo the polynomial, bit-reflected. Shifted by one, because the product of two reflected
// numbers of 64 bits has 127 bits and lies one place too low.
constexpr std::uint64_t power(int n) {
    std::uint32_t value = 0x80000000;
    for (; n > 0; --n) value = (value >> 1) ^ (value & 1 ? polynomial : 0);
    return std::uint64_t{value} << 1;
}

// The two multipliers (for the low and the high half) that move a block of 128 bits `distance` bits
// on without changing the remainder.
struct Fold {
    std::uint64_t low, high;
};
constexpr Fold fold_by(int distance) { return {power(distance + 32), power(distance - 32)}; }

POTLUCK_FOLD_TARGET inline __m512i spread(Fold fold) {
    return _mm512_set_epi64(static_cast<long long>(fold.high), static_cast<long long>(fold.low),
                            static_cast<long long>(fold.high), static_cast<long long>(fold.low),
                            static_cast<long long>(fold.high), static_cast<long long>(fold.low),
                            static_cast<long long>(fold.high), static_cast<long long>(fold.low));
}

// `next` plus the four 128-bit blocks of `block`, moved on to its place.
POTLUCK_FOLD_TARGET inline __m512i folded(__m512i block, __m512i fold, __m512i next) {
    constexpr int exclusive_or = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(block, fold, 0x00),
                                     _mm512_clmulepi64_epi128(block, fold, 0x11), next,
                                     exclusive_or);
}

constexpr std::size_t fold_bytes = 256;

// The folding algorithm of Gopal et al. (Intel), "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction", 2009, on registers of 512 bits: four of them run over the data (to
// hide the latency of the multiplication), and are then folded into 16 bytes with the same
// remainder.
POTLUCK_FOLD_TARGET std::uint32_t by_folding(const unsigned char* data, std::size_t count,
                                             std::uint32_t state) {
    __m512i blocks[4];
    for (int k = 0; k < 4; ++k) blocks[k] = _mm512_loadu_si512(data + 64 * k);
    blocks[0] = _mm512_xor_si512(
        blocks[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
    const __m512i far = spread(fold_by(2048)), near = spread(fold_by(512));
    for (data += fold_bytes, count -= fold_bytes; count >= fold_bytes;
         data += fold_bytes, count -= fold_bytes) {
        for (int k = 0; k < 4; ++k) {
            blocks[k] = folded(blocks[k], far, _mm512_loadu_si512(data + 64 * k));
        }
    }
    for (int k = 1; k < 4; ++k) blocks[k] = folded(blocks[k - 1], near, blocks[k]);
    alignas(64) unsigned char last[64];
    _mm512_store_si512(last, blocks[3]);
    constexpr Fold folds[] = {fold_by(384), fold_by(256), fold_by(128)};
    __m128i sum = _mm_load_si128(reinterpret_cast<const __m128i*>(last + 48));
    for (int k = 0; k < 3; ++k) {
        const __m128i block = _mm_load_si128(reinterpret_cast<const __m128i*>(last + 16 * k));
        const __m128i fold = _mm_set_epi64x(static_cast<long long>(folds[k].high),
                                            static_cast<long long>(folds[k].low));
        sum = _mm_xor_si128(sum, _mm_xor_si128(_mm_clmulepi64_si128(block, fold, 0x00),
                                               _mm_clmulepi64_si128(block, fold, 0x11)));
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(last), sum);
    return by_instruction(data, count, by_instruction(last, 16, 0));
}

#endif

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t count) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::uint32_t state = ~crc;
    for (; count >= 8; bytes += 8, count -= 8) {
        std::uint32_t next = 0;
        for (int k = 0; k < 4; ++k) {
            next ^= tables[7 - k][(bytes[k] ^ state >> (8 * k)) & 0xff] ^ tables[3 - k][bytes[4 + k]];
        }
        state = next;
    }
    return ~by_byte(bytes, count, state);
}

std::uint32_t crc32c_lanes(std::uint32_t crc, const void* data, std::size_t count) {
#if defined(POTLUCK_CRC_TARGET)
    static const bool has_it = has_instruction();
    if (has_it) return ~by_instruction(static_cast<const unsigned char*>(data), count, ~crc);
#endif
    return crc32c_portable(crc, data, count);
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t count) {
#if defined(POTLUCK_FOLD_TARGET)
    static const bool can_fold = cpu().vpclmul;
    if (can_fold && count >= fold_bytes) {
        return ~by_folding(static_cast<const unsigned char*>(data), count, ~crc);
    }
#endif
    return crc32c_lanes(crc, data, count);
}

}  // namespace potluck
