// Copying out of the window into memory of the user.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#endif

namespace potluck::window {

// Results that together are larger than this do not stay in the caches that cores share.
constexpr std::size_t CACHED_BYTES = std::size_t{32} << 20;

// As memcpy, past the caches: a plain store first reads the line that it overwrites, which for memory
// that is in no cache costs as much again.
inline void stream(char* to, const char* from, std::size_t length) {
#if defined(__x86_64__) || defined(_M_X64)
    constexpr std::size_t LINE = 64;
    const std::size_t head = std::min(
        length, (LINE - reinterpret_cast<std::size_t>(to) % LINE) % LINE);
    std::memcpy(to, from, head);
    std::size_t at = head;
    for (; at + LINE <= length; at += LINE) {
        const auto* lane = reinterpret_cast<const __m128i*>(from + at);
        auto* target = reinterpret_cast<__m128i*>(to + at);
        const __m128i a = _mm_loadu_si128(lane), b = _mm_loadu_si128(lane + 1);
        const __m128i c = _mm_loadu_si128(lane + 2), d = _mm_loadu_si128(lane + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to + at, from + at, length - at);
    _mm_sfence();
#else
    std::memcpy(to, from, length);
#endif
}

}  // namespace potluck::window
