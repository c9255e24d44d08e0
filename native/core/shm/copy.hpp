// Copies out of shared memory that mind the cache coherence protocol (MESI): claims, which make the
// next write of the line cheaper, and non-temporal stores.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/shm/layout.hpp"

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#endif

namespace potluck::shm {

// Claiming a cache line: storing the value that is there. In terms of MESI: a core that only reads
// a line leaves it Shared in both cores' caches, and the next core that writes it must first have
// the other copy invalidated, which takes several times as long as the read did. A core that stores
// into the line has it Modified, and the next writer gets it in one transfer. So a rank that reads
// a line which another rank wrote, and will write again, claims it in passing.
//
// A store of an old value is a lost update if another rank writes the line at the same time. It is
// safe only where no other rank uses the line between the tick that published it and the tick that
// frees it: `RunningCall::is_only_reader` says where.
//
// Figures: 64 KiB written on one core and read on another, in turns, took 8.3 us without claims and
// 2.6 us with them on a Zen 4, 33 and 12 us between distant cores. Claims in the same pass as the
// read cost less than a pass of their own: 44 against 57 us for all-reduces of 1 MiB on two ranks.
inline void claim_line(char* at) {
    // volatile: compilers remove a store of the value that was just read.
    auto* word = reinterpret_cast<volatile std::uint32_t*>(at);
    *word = *word;
}

inline void claim(char* at, std::size_t length) {
    for (std::size_t offset = 0; offset < length; offset += LINE) claim_line(at + offset);
}

// memcpy that claims each line of `from` while that line is in the L1 cache. `from` begins a line.
inline void copy_claimed(char* to, char* from, std::size_t length) {
    std::size_t at = 0;
    for (; at + LINE <= length; at += LINE) {
        std::memcpy(to + at, from + at, LINE);
        claim_line(from + at);
    }
    claim(from + at, length - at);  // the last line, of which only a part is read
    std::memcpy(to + at, from + at, length - at);
}

// memcpy with non-temporal stores, past the caches: a plain store first reads the line that it
// overwrites, which for memory that is in no cache costs as much again. May claim the lines that it
// reads; `from` then begins a line.
template <bool claims>
inline void copy_nontemporal(char* to, std::conditional_t<claims, char*, const char*> from,
                   std::size_t length) {
#if defined(__x86_64__) || defined(_M_X64)
    const std::size_t head = std::min(
        length, (LINE - reinterpret_cast<std::size_t>(to) % LINE) % LINE);
    std::memcpy(to, from, head);
    std::size_t at = head;
    for (; at + LINE <= length; at += LINE) {
        const auto* lane = reinterpret_cast<const __m128i*>(from + at);
        auto* target = reinterpret_cast<__m128i*>(to + at);
        const __m128i a = _mm_loadu_si128(lane), b = _mm_loadu_si128(lane + 1);
        const __m128i c = _mm_loadu_si128(lane + 2), d = _mm_loadu_si128(lane + 3);
        // `at` is aligned for the stores, not the loads: claim the line in which the load began.
        if constexpr (claims) claim_line(from + at / LINE * LINE);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    if constexpr (claims) claim(from + at / LINE * LINE, length - at / LINE * LINE);
    std::memcpy(to + at, from + at, length - at);
    // Non-temporal stores are weakly ordered: without the fence they could become visible after the
    // store of this rank's next tick.
    _mm_sfence();
#else
    if constexpr (claims) copy_claimed(to, from, length);
    else std::memcpy(to, from, length);
#endif
}

}  // namespace potluck::shm
