// Element types and operations, numbered as on the wire (src/potluck/_core/wire/dtypes.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

enum class Dtype : std::uint8_t {
    float16 = 1,
    bfloat16 = 2,
    float32 = 3,
    float64 = 4,
    int8 = 5,
    int32 = 6,
    int64 = 7,
    uint8 = 8,
    boolean = 9,
    int16 = 10,
    uint16 = 11,
    uint32 = 12,
    uint64 = 13,
    complex64 = 14,
    complex128 = 15,
};
constexpr int num_dtypes = 16;  // code 0 is none

// A mean is a sum here, which `divide` finishes.
enum class Op : std::uint8_t {
    sum = 0, min = 1, max = 2, product = 3, band = 4, bor = 5, bxor = 6
};
constexpr int num_ops = 7;

constexpr std::size_t item_bytes(Dtype dtype) {
    constexpr std::size_t sizes[num_dtypes] = {0, 2, 2, 4, 8, 1, 4, 8, 1, 1, 2, 2, 4, 8, 8, 16};
    return sizes[static_cast<int>(dtype)];
}

}  // namespace potluck
