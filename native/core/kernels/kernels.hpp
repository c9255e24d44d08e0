// The dispatch table of the kernels: one table per instruction set (kernels_*.cpp). `kernels()` is
// the best one that this processor runs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/kernels/dtype.hpp"

namespace potluck {

// out[i] = op(a[i], b[i]); out may be a or b.
using Combine = void (*)(void* out, const void* a, const void* b, std::size_t count);
// The same, with a copy of the result at `also`, which may be a or b.
using CombineIntoBoth = void (*)(void* out, void* also, const void* a, const void* b,
                              std::size_t count);
// out[i] = op(op(sources[0][i], sources[1][i]), ...) of three or four; out may be any of them. One
// pass over out, where combining two at a time would read and write it for each source.
using CombineMany = void (*)(void* out, const void* const* sources, std::size_t num_sources,
                             std::size_t count);
constexpr std::size_t max_sources = 4;
// target[i] = source[i] / divisor; target may be the source. With a divisor below 1 a finite element
// stays finite: what rounding has carried beyond the largest number becomes that number.
using Divide = void (*)(void* target, const void* source, std::size_t count, double divisor);
using Convert = void (*)(void* target, const void* source, std::size_t count);

// float32 to and from a 16-bit type.
struct Half {
    Convert widen = nullptr;       // float32 target = source
    Convert narrow = nullptr;      // target = float32 source, rounded to nearest even
    Convert widen_add = nullptr;   // float32 target += source
    Convert widen_multiply = nullptr;
};

// One block of an integer codec, count <= block_elements, as codes of one byte from -levels to
// levels. Encoding returns the scale.
using EncodeBlock = float (*)(void* codes, const void* source, std::size_t count, float levels);
using DecodeBlock = void (*)(void* target, const void* codes, float scale, std::size_t count);

// Codes of one byte to and from fewer bits.
struct Pack {
    Convert pack = nullptr;
    Convert unpack = nullptr;
};

// residual = sent - decoded, and zero where that is not finite.
using KeepLost = void (*)(void* residual, const void* sent, const void* decoded, std::size_t count);

// The largest magnitude of 16-bit floats, as an integer: these have the order of their values, with
// infinity and NaN at the end.
using LargestHalf = std::uint16_t (*)(const void* values, std::size_t count);

// Magnitudes are float32 without their sign, as integers, which have the same order (select.cpp).
// The maxima of 16 * (count / 256) groups and of count % 256 single values.
using GroupMaxima = void (*)(std::uint32_t* maxima, const void* values, std::size_t count);
using CountAtLeast = std::size_t (*)(const std::uint32_t* magnitudes, std::size_t count,
                                     std::uint32_t bound);
// The values whose magnitude is at least `bound` < 2^31; returns their number.
using Collect = std::size_t (*)(std::uint32_t* positions, std::uint32_t* magnitudes,
                                const void* values, std::size_t count, std::uint32_t bound);

// target = left right, of n x rank and rank x m elements, row by row. Each product and each sum is
// rounded, in the order of the ranks. rank > 0.
using Multiply = void (*)(void* target, const void* left, const void* right, std::size_t n,
                          std::size_t m, std::size_t rank);

struct Kernels {
    Combine combine[num_dtypes][num_ops] = {};
    CombineIntoBoth combine_into_both[num_dtypes] = {};  // sums, as the next ones
    CombineMany combine_many[num_dtypes] = {};
    Divide divide[num_dtypes] = {};
    Half float16, bfloat16;
    LargestHalf largest_half = nullptr;
    EncodeBlock encode_block = nullptr;
    DecodeBlock decode_block = nullptr;
    DecodeBlock decode_add_block = nullptr;
    Pack pack4, pack2;
    KeepLost keep_lost = nullptr;
    GroupMaxima group_maxima = nullptr;
    CountAtLeast count_at_least = nullptr;
    Collect collect = nullptr;
    Multiply multiply[num_dtypes] = {};  // float32, float64
    const char* name = "";
};

const Kernels& kernels();

// The names of the tables that run on this machine, the best last. Tests and benchmarks choose
// another one by `use_kernel_set`.
std::vector<std::string> kernel_sets();
void use_kernel_set(const std::string& name);

// nullptr where the compiler lacks the instructions. To be called where cpu() has them.
const Kernels* kernels_base();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

}  // namespace potluck
