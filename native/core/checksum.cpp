#include "core/checksum.hpp"

#include <array>
#include <cstring>

#include "core/cpu.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define POTLUCK_CRC_TARGET __attribute__((target("sse4.2")))
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

constexpr std::uint32_t polynomial = 0x82f63b78;  // bits reversed

using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: what byte b does to the register, k bytes later.
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

// The register after `bytes` zero bytes more is linear in the register: four tables give it.
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

// The instruction takes 3 cycles but can start every cycle: three lanes of `lane` bytes at a time.
constexpr std::size_t lane = 1024;

POTLUCK_CRC_TARGET std::uint32_t by_instruction(const unsigned char* data, std::size_t count,
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
    for (; count >= 8; data += 8, count -= 8) a = step8(a, data);
    return by_byte(data, count, static_cast<std::uint32_t>(a));
}

bool has_instruction() {
    return cpu().sse42 || cpu().arm_crc32;
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

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t count) {
#if defined(POTLUCK_CRC_TARGET)
    static const bool fast = has_instruction();
    if (fast) return ~by_instruction(static_cast<const unsigned char*>(data), count, ~crc);
#endif
    return crc32c_portable(crc, data, count);
}

}  // namespace potluck
