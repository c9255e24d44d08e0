#include "core/kernels/select.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/kernels/kernels.hpp"

namespace potluck {

namespace {

using Words = std::vector<std::uint32_t>;

// Up to so many values one pass for each bit is faster than a histogram.
constexpr std::size_t few = 2048;
constexpr std::size_t tile = 4096;

// Keeps, in place, the values whose 11 bits from `shift` on are those of the k-th largest; their
// bits above must be equal. Sets these bits in `found`, lowers k by the number of larger values,
// and returns how many are kept.
std::size_t narrow(std::uint32_t* values, std::size_t count, std::size_t& k, unsigned shift,
                   std::uint32_t& found) {
    constexpr std::uint32_t mask = 2047;
    std::uint32_t even[mask + 1] = {}, odd[mask + 1] = {};  // two: equal digits follow each other
    std::size_t i = 0;
    for (; i + 1 < count; i += 2) {
        ++even[values[i] >> shift & mask];
        ++odd[values[i + 1] >> shift & mask];
    }
    if (i < count) ++even[values[i] >> shift & mask];
    std::uint32_t digit = mask;
    for (; even[digit] + odd[digit] < k; --digit) k -= even[digit] + odd[digit];
    found |= digit << shift;
    std::size_t kept = 0;
    for (i = 0; i < count; ++i) {
        const std::uint32_t value = values[i];
        values[kept] = value;
        kept += (value >> shift & mask) == digit;
    }
    return kept;
}

// The k-th largest of magnitudes, k >= 1: digit by digit, then bit by bit. Overwrites them.
std::uint32_t kth_largest(std::uint32_t* values, std::size_t count, std::size_t k) {
    std::uint32_t found = 0;
    unsigned unknown = 31;  // bits
    while (count > few && unknown > 9) {
        unknown -= 11;
        count = narrow(values, count, k, unknown, found);
    }
    for (std::uint32_t bit = 1u << unknown >> 1; bit != 0; bit >>= 1) {
        if (kernels().count_at_least(values, count, found | bit) >= k) found |= bit;
    }
    return found;
}

// The buffers of a selection, kept from one chunk to the next.
struct Scratch {
    Words maxima, positions, magnitudes, ranked;
};

// Selects from one chunk. At least k groups of values have a maximum of `bound` or more, so at
// least k values have: only these are candidates, and in a gradient they are few more than k. With
// too few groups each value is one.
void select_one(std::uint32_t* positions, const char* values, std::size_t count, std::size_t k,
                std::size_t offset, Scratch& scratch) {
    const Kernels& table = kernels();
    Words& maxima = scratch.maxima;
    maxima.resize(16 * (count / 256) + count % 256);
    if (k < maxima.size()) {
        table.group_maxima(maxima.data(), values, count);
    } else {
        maxima.resize(count);
        std::memcpy(maxima.data(), values, 4 * count);
        for (std::uint32_t& each : maxima) each &= 0x7fffffff;
    }
    const std::uint32_t bound = kth_largest(maxima.data(), maxima.size(), k);
    scratch.positions.clear();
    scratch.magnitudes.clear();
    std::uint32_t found[tile], magnitudes[tile];
    for (std::size_t begin = 0; begin < count; begin += tile) {
        const std::size_t n = table.collect(found, magnitudes, values + 4 * begin,
                                            std::min(tile, count - begin), bound);
        for (std::size_t i = 0; i < n; ++i) found[i] += static_cast<std::uint32_t>(begin);
        scratch.positions.insert(scratch.positions.end(), found, found + n);
        scratch.magnitudes.insert(scratch.magnitudes.end(), magnitudes, magnitudes + n);
    }
    scratch.ranked = scratch.magnitudes;
    const std::uint32_t least = kth_largest(scratch.ranked.data(), scratch.ranked.size(), k);
    std::size_t num_equal = k;  // that are taken
    if (least < 0xffffffffu) {
        num_equal -= table.count_at_least(scratch.magnitudes.data(), scratch.magnitudes.size(),
                                          least + 1);
    }
    for (std::size_t i = 0; i < scratch.positions.size(); ++i) {
        const std::uint32_t magnitude = scratch.magnitudes[i];
        if (magnitude < least) continue;
        if (magnitude == least) {
            if (num_equal == 0) continue;
            --num_equal;
        }
        *positions++ = static_cast<std::uint32_t>(offset + scratch.positions[i]);
    }
}

}  // namespace

void select_largest(std::uint32_t* positions, void* values, const void* source, void* residual,
                    std::size_t count, std::size_t chunk, std::size_t k, std::size_t last_k) {
    const Combine add = kernels().combine[static_cast<int>(Dtype::float32)][static_cast<int>(Op::sum)];
    char* out = static_cast<char*>(values);
    Scratch scratch;
    for (std::size_t begin = 0; begin < count; begin += chunk) {
        const std::size_t n = std::min(chunk, count - begin);
        const char* from = static_cast<const char*>(source) + 4 * begin;
        if (residual != nullptr) {
            char* const sum = static_cast<char*>(residual) + 4 * begin;
            add(sum, sum, from, n);
            from = sum;
        }
        const std::size_t num_taken = n == chunk ? k : last_k;
        select_one(positions, from, n, num_taken, begin, scratch);
        for (std::size_t i = 0; i < num_taken; ++i) {
            std::memcpy(out + 4 * i, from + 4 * (positions[i] - begin), 4);
        }
        positions += num_taken;
        out += 4 * num_taken;
    }
}

}  // namespace potluck
