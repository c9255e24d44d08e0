// The loops of all kernels, in plain C++ that compilers vectorize. Included once per instruction
// set, by kernels_*.cpp, which are compiled with different flags. Therefore all is in an unnamed
// namespace, and no inline function of the standard library is called: of an inline function the
// linker keeps one copy for all files, which could be the one with instructions that an older
// processor lacks.
#include <initializer_list>

#include "core/kernels/kernels.hpp"

#if !defined(__GNUC__)
#include <string.h>
#define __builtin_memcpy memcpy
#define __builtin_memset memset
#endif

#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define POTLUCK_LOOP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define POTLUCK_LOOP _Pragma("GCC ivdep")
#else
#define POTLUCK_LOOP
#endif

namespace potluck {
namespace {

// POTLUCK_LOOP: the compiler may assume that iterations do not depend on each other, so that it
// vectorizes without run-time checks for overlap. True of every loop here: arrays are either the
// same memory, element by element, or apart.

// An element anywhere in memory: no alignment, no type-based aliasing.
#if defined(__GNUC__)
template <class T>
struct __attribute__((packed, may_alias)) Any {
    T value;
};
#else
#pragma pack(push, 1)
template <class T>
struct Any {
    T value;
};
#pragma pack(pop)
#endif

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline float from_bits(u32 bits) { return __builtin_bit_cast(float, bits); }
inline u32 to_bits(float value) { return __builtin_bit_cast(u32, value); }

// -- 16-bit floats

struct Float16 {
    u16 bits;
};
struct Bfloat16 {
    u16 bits;
};

inline float widen(Bfloat16 value) { return from_bits(u32{value.bits} << 16); }

// Round to nearest even: add just under half of the last kept place, and one more if that place is
// odd. The carry into the exponent is right, also into infinity. A NaN is kept apart: its payload
// could be carried away, or lie in the bits that are cut off; bit 6 makes it a quiet one.
inline void narrow(float value, Bfloat16& out) {
    const u32 bits = to_bits(value);
    const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const u32 nan = (bits >> 16) | 0x40u;
    out.bits = static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

#if defined(__F16C__)

inline float widen(Float16 value) { return _cvtsh_ss(value.bits); }
inline void narrow(float value, Float16& out) {
    out.bits = static_cast<u16>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__) && defined(__GNUC__)

inline float widen(Float16 value) { return static_cast<float>(__builtin_bit_cast(__fp16, value.bits)); }
inline void narrow(float value, Float16& out) {
    out.bits = __builtin_bit_cast(u16, static_cast<__fp16>(value));
}

#else

inline float widen(Float16 value) {
    const u32 sign = u32{value.bits & 0x8000u} << 16;
    const u32 magnitude = value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x400u) return from_bits(sign | ((magnitude << 13) + (112u << 23)));
    // Zero and subnormals: an integer times 2^-24, which float32 holds exactly.
    const float small = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return from_bits(sign | to_bits(small));
}

inline void narrow(float value, Float16& out) {
    const u32 bits = to_bits(value);
    const u32 sign = (bits >> 16) & 0x8000u;
    const u32 magnitude = bits & 0x7fffffffu;
    u32 half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {
        half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else {
        // Below 2^-14: adding 0.5 makes the adder round at the subnormals' last place.
        half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    }
    out.bits = static_cast<u16>(sign | half);
}

#endif

// -- operations on two values

template <class T>
constexpr T largest_of = T{};
template <>
constexpr float largest_of<float> = 3.40282346638528859812e38f;
template <>
constexpr double largest_of<double> = 1.79769313486231570815e308;

struct Sum {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a + b); }
};
struct Product {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a * b); }
};
// The second value when they are equal; NaN when either is: `a != a` finds a NaN in a, and a
// comparison with a NaN in b is false. `|` instead of `||`, which would keep the loop a branch.
struct Min {
    template <class T>
    static T of(T a, T b) { return ((a < b) | (a != a)) ? a : b; }
};
struct Max {
    template <class T>
    static T of(T a, T b) { return ((a > b) | (a != a)) ? a : b; }
};
// The first value when they are equal: NumPy's rule for float16.
struct MinFirst {
    static float of(float a, float b) { return ((a <= b) | (a != a)) ? a : b; }
};
struct MaxFirst {
    static float of(float a, float b) { return ((a >= b) | (a != a)) ? a : b; }
};
struct Band {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a & b); }
};
struct Bor {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a | b); }
};
struct Bxor {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a ^ b); }
};

// -- loops

template <class T, class Operation>
void combine_loop(void* out, const void* a, const void* b, std::size_t count) {
    auto* o = static_cast<Any<T>*>(out);
    const auto* x = static_cast<const Any<T>*>(a);
    const auto* y = static_cast<const Any<T>*>(b);
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) o[i].value = Operation::of(x[i].value, y[i].value);
}

template <class T, class Operation>
void combine_into_both_loop(void* out, void* also, const void* a, const void* b,
                            std::size_t count) {
    auto* o = static_cast<Any<T>*>(out);
    auto* p = static_cast<Any<T>*>(also);
    const auto* x = static_cast<const Any<T>*>(a);
    const auto* y = static_cast<const Any<T>*>(b);
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        const T value = Operation::of(x[i].value, y[i].value);
        o[i].value = value;
        p[i].value = value;
    }
}

template <class T, class Operation>
void combine_many_loop(void* out, const void* const* sources, std::size_t num_sources,
                       std::size_t count) {
    static_assert(max_sources == 4);
    auto* o = static_cast<Any<T>*>(out);
    const auto* x = static_cast<const Any<T>*>(sources[0]);
    const auto* y = static_cast<const Any<T>*>(sources[1]);
    const auto* z = static_cast<const Any<T>*>(sources[2]);
    const auto* last = static_cast<const Any<T>*>(sources[num_sources - 1]);
    if (num_sources == 3) {
        POTLUCK_LOOP
        for (std::size_t i = 0; i < count; ++i) {
            o[i].value = Operation::of(Operation::of(x[i].value, y[i].value), z[i].value);
        }
        return;
    }
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        const T three = Operation::of(Operation::of(x[i].value, y[i].value), z[i].value);
        o[i].value = Operation::of(three, last[i].value);
    }
}

#if defined(__F16C__)

constexpr std::size_t lanes = 8;
using Wide = __m256;
inline Wide load(const void* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline void store(void* to, Wide value) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

// The compiler does not vectorize these conversions by itself.
inline void widen_some(float* out, const Any<Float16>* in, std::size_t count) {
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const Wide value = load(in + i);
        __builtin_memcpy(out + i, &value, sizeof value);
    }
    for (; i < count; ++i) out[i] = widen(in[i].value);
}
inline void narrow_some(Any<Float16>* out, const float* in, std::size_t count) {
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        Wide value;
        __builtin_memcpy(&value, in + i, sizeof value);
        store(out + i, value);
    }
    for (; i < count; ++i) {
        Float16 rounded;
        narrow(in[i], rounded);
        out[i].value = rounded;
    }
}

#else

inline void widen_some(float* out, const Any<Float16>* in, std::size_t count) {
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) out[i] = widen(in[i].value);
}
inline void narrow_some(Any<Float16>* out, const float* in, std::size_t count) {
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        Float16 rounded;
        narrow(in[i], rounded);
        out[i].value = rounded;
    }
}

#endif

inline void widen_some(float* out, const Any<Bfloat16>* in, std::size_t count) {
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) out[i] = widen(in[i].value);
}
inline void narrow_some(Any<Bfloat16>* out, const float* in, std::size_t count) {
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        Bfloat16 rounded;
        narrow(in[i], rounded);
        out[i].value = rounded;
    }
}

// 16-bit floats go through float32 strips that stay in the L1 cache.
constexpr std::size_t strip = 256;

template <class F>
inline void for_strips(std::size_t count, F&& work) {
    std::size_t i = 0;
    for (; i + strip <= count; i += strip) work(i, strip);
    if (i < count) work(i, count - i);
}

template <class H, class Operation>
void combine_half(void* out, const void* a, const void* b, std::size_t count) {
    auto* o = static_cast<Any<H>*>(out);
    const auto* x = static_cast<const Any<H>*>(a);
    const auto* y = static_cast<const Any<H>*>(b);
    for_strips(count, [&](std::size_t at, std::size_t n) {
        float left[strip], right[strip];
        widen_some(left, x + at, n);
        widen_some(right, y + at, n);
        POTLUCK_LOOP
        for (std::size_t i = 0; i < n; ++i) left[i] = Operation::of(left[i], right[i]);
        narrow_some(o + at, left, n);
    });
}

template <class H>
void widen_loop(void* target, const void* source, std::size_t count) {
    auto* out = static_cast<Any<float>*>(target);
    const auto* in = static_cast<const Any<H>*>(source);
    for_strips(count, [&](std::size_t at, std::size_t n) {
        float wide[strip];
        widen_some(wide, in + at, n);
        __builtin_memcpy(out + at, wide, n * sizeof(float));
    });
}

template <class H>
void narrow_loop(void* target, const void* source, std::size_t count) {
    auto* out = static_cast<Any<H>*>(target);
    const auto* in = static_cast<const Any<float>*>(source);
    for_strips(count, [&](std::size_t at, std::size_t n) {
        float wide[strip];
        __builtin_memcpy(wide, in + at, n * sizeof(float));
        narrow_some(out + at, wide, n);
    });
}

template <class H, class Operation>
void widen_combine(void* target, const void* source, std::size_t count) {
    auto* out = static_cast<Any<float>*>(target);
    const auto* in = static_cast<const Any<H>*>(source);
    for_strips(count, [&](std::size_t at, std::size_t n) {
        float wide[strip];
        widen_some(wide, in + at, n);
        // A local pointer: for the compiler a store through the captured one could change it.
        Any<float>* const o = out + at;
        POTLUCK_LOOP
        for (std::size_t i = 0; i < n; ++i) o[i].value = Operation::of(o[i].value, wide[i]);
    });
}

// Signed, for the maximum that the oldest vector instructions have.
u16 largest_half(const void* values, std::size_t count) {
    const auto* in = static_cast<const Any<std::int16_t>*>(values);
    std::int16_t largest = 0;
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        const auto magnitude = static_cast<std::int16_t>(in[i].value & 0x7fff);
        largest = magnitude > largest ? magnitude : largest;
    }
    return static_cast<u16>(largest);
}

// The products are stored before they are added. In one expression GCC makes fused multiply-adds of
// them, in spite of -ffp-contract=off, and the result would depend on the processor.
template <class T>
void complex_product(void* out, const void* a, const void* b, std::size_t count) {
    auto* o = static_cast<Any<T>*>(out);
    const auto* x = static_cast<const Any<T>*>(a);
    const auto* y = static_cast<const Any<T>*>(b);
    for_strips(count, [&](std::size_t at, std::size_t n) {
        T straight[2 * strip], crossed[2 * strip];
        for (std::size_t i = 0; i < 2 * n; i += 2) {
            const T xr = x[2 * at + i].value, xi = x[2 * at + i + 1].value;
            const T yr = y[2 * at + i].value, yi = y[2 * at + i + 1].value;
            straight[i] = xr * yr;
            straight[i + 1] = xr * yi;
            crossed[i] = xi * yi;
            crossed[i + 1] = xi * yr;
        }
#if defined(__GNUC__)
        asm volatile("" : "+m"(straight), "+m"(crossed));
#endif
        Any<T>* const to = o + 2 * at;
        for (std::size_t i = 0; i < 2 * n; i += 2) {
            to[i].value = straight[i] - crossed[i];
            to[i + 1].value = straight[i + 1] + crossed[i + 1];
        }
    });
}

template <class T>
void complex_sum(void* out, const void* a, const void* b, std::size_t count) {
    combine_loop<T, Sum>(out, a, b, 2 * count);
}

// `quotient` of a finite value, kept within the largest number.
template <class T>
inline T kept(T value, T quotient, T largest) {
    const T bounded = quotient > largest ? largest : (quotient < -largest ? -largest : quotient);
    return (value <= largest) & (value >= -largest) ? bounded : quotient;
}

inline float largest_of_half(Float16) { return 65504.0f; }
inline float largest_of_half(Bfloat16) { return 3.38953138925153547590e38f; }

template <class T>
void divide_loop(void* target, const void* source, std::size_t count, double divisor) {
    auto* out = static_cast<Any<T>*>(target);
    const auto* in = static_cast<const Any<T>*>(source);
    const T by = static_cast<T>(divisor);
    if (divisor < 1) {
        POTLUCK_LOOP
        for (std::size_t i = 0; i < count; ++i) {
            const T value = in[i].value;
            out[i].value = kept<T>(value, value / by, largest_of<T>);
        }
        return;
    }
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) out[i].value = in[i].value / by;
}

template <class H>
void divide_half(void* target, const void* source, std::size_t count, double divisor) {
    auto* out = static_cast<Any<H>*>(target);
    const auto* in = static_cast<const Any<H>*>(source);
    H rounded;
    narrow(static_cast<float>(divisor), rounded);
    const float by = widen(rounded), largest = largest_of_half(rounded);
    for_strips(count, [&](std::size_t at, std::size_t n) {
        float wide[strip];
        widen_some(wide, in + at, n);
        if (divisor < 1) {
            POTLUCK_LOOP
            for (std::size_t i = 0; i < n; ++i) wide[i] = kept(wide[i], wide[i] / by, largest);
        } else {
            POTLUCK_LOOP
            for (std::size_t i = 0; i < n; ++i) wide[i] = wide[i] / by;
        }
        narrow_some(out + at, wide, n);
    });
}

template <class T>
void divide_complex(void* target, const void* source, std::size_t count, double divisor) {
    divide_loop<T>(target, source, 2 * count, divisor);
}

// -- blocks of integers

float encode_block(void* codes, const void* source, std::size_t count, float levels) {
    auto* out = static_cast<Any<u8>*>(codes);
    const auto* in = static_cast<const Any<u32>*>(source);
    // Magnitudes are compared as integers: the bits of floats without a sign have the order of
    // their values, and infinity and NaN come last.
    u32 largest = 0;
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        const u32 magnitude = in[i].value & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    // Not finite, or below 2^-100: a bound well above the magnitudes for which `inverse` overflows
    // or the scale is subnormal. See src/potluck/_core/codecs/integers.py.
    if (largest >= 0x7f800000u || largest < 0x0d800000u) {
        __builtin_memset(codes, 0, count);
        return largest >= 0x7f800000u ? from_bits(0x7fc00000u) : 0.0f;
    }
    const float maximum = from_bits(largest);
    const float inverse = levels / maximum;
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even: the last place of such a float
    // is 1. The integer is then in the low bits, in two's complement.
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        const float shifted = from_bits(in[i].value) * inverse + 12582912.0f;
        out[i].value = static_cast<u8>(to_bits(shifted));
    }
    const float scale = maximum / levels;
    // Rounded up, it could make the largest code infinite: then the number below it.
    return scale * levels > largest_of<float> ? from_bits(to_bits(scale) - 1) : scale;
}

template <bool add>
void decode_block(void* target, const void* codes, float scale, std::size_t count) {
    auto* out = static_cast<Any<float>*>(target);
    const auto* in = static_cast<const Any<std::int8_t>*>(codes);
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        const float value = static_cast<float>(in[i].value) * scale;
        out[i].value = add ? out[i].value + value : value;
    }
}

// `count` signed codes of one byte to and from `bits` (4 or 2) each. Byte i holds, from its low
// bits on, the codes i, i + size, i + 2 * size, ..., where size is the number of bytes: so a vector
// of bytes is made of whole vectors of codes.
template <int bits>
void pack_block(void* packed, const void* codes, std::size_t count) {
    constexpr int per_byte = 8 / bits;
    constexpr u32 mask = (1u << bits) - 1;
    const std::size_t size = (count + per_byte - 1) / per_byte;
    auto* out = static_cast<Any<u8>*>(packed);
    const auto* in = static_cast<const Any<u8>*>(codes);
    const std::size_t last = count - (per_byte - 1) * size;  // codes in the last, shorter, row
    if (last > size) {  // fewer codes than rows: only for blocks of one to five codes
        for (std::size_t i = 0; i < size; ++i) {
            u32 byte = 0;
            for (int row = 0; row < per_byte; ++row) {
                const std::size_t at = i + row * size;
                if (at < count) byte |= (in[at].value & mask) << (row * bits);
            }
            out[i].value = static_cast<u8>(byte);
        }
        return;
    }
    POTLUCK_LOOP
    for (std::size_t i = 0; i < size; ++i) {
        u32 byte = 0;
        for (int row = 0; row < per_byte - 1; ++row) {
            byte |= (in[i + row * size].value & mask) << (row * bits);
        }
        out[i].value = static_cast<u8>(byte);
    }
    POTLUCK_LOOP
    for (std::size_t i = 0; i < last; ++i) {
        const u32 code = in[i + (per_byte - 1) * size].value & mask;
        out[i].value = static_cast<u8>(out[i].value | code << (8 - bits));
    }
}

template <int bits>
void unpack_block(void* codes, const void* packed, std::size_t count) {
    constexpr int per_byte = 8 / bits;
    constexpr int mask = (1 << bits) - 1, sign = 1 << (bits - 1);
    const std::size_t size = (count + per_byte - 1) / per_byte;
    const auto* in = static_cast<const Any<u8>*>(packed);
    for (int row = 0; row < per_byte; ++row) {
        const std::size_t begin = row * size;
        if (begin >= count) return;
        const std::size_t n = count - begin < size ? count - begin : size;
        Any<u8>* const out = static_cast<Any<u8>*>(codes) + begin;
        POTLUCK_LOOP
        for (std::size_t i = 0; i < n; ++i) {
            const int code = (in[i].value >> (row * bits)) & mask;
            out[i].value = static_cast<u8>((code ^ sign) - sign);
        }
    }
}

void keep_lost(void* residual, const void* sent, const void* decoded, std::size_t count) {
    auto* out = static_cast<Any<float>*>(residual);
    const auto* from = static_cast<const Any<float>*>(sent);
    const auto* to = static_cast<const Any<float>*>(decoded);
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) {
        const float lost = from[i].value - to[i].value;
        out[i].value = (to_bits(lost) & 0x7f800000u) == 0x7f800000u ? 0.0f : lost;
    }
}

// -- products

// out[j] = ((out[j] + l[0] r[0][j]) + l[1] r[1][j]) + ..., of `num` <= 4 ranks; without out[j] for
// the first ones.
template <class T, int num, bool first>
void multiply_ranks(Any<T>* out, const Any<T>* l, const Any<T>* r, std::size_t m,
                    std::size_t stride) {
    const T a = l[0].value, b = num > 1 ? l[1].value : T{}, c = num > 2 ? l[2].value : T{},
            d = num > 3 ? l[3].value : T{};
    POTLUCK_LOOP
    for (std::size_t j = 0; j < m; ++j) {
        T sum = a * r[j].value;
        if (!first) sum = out[j].value + sum;
        if (num > 1) sum = sum + b * r[stride + j].value;
        if (num > 2) sum = sum + c * r[2 * stride + j].value;
        if (num > 3) sum = sum + d * r[3 * stride + j].value;
        out[j].value = sum;
    }
}

template <class T, bool first>
void multiply_up_to_4(Any<T>* out, const Any<T>* l, const Any<T>* r, std::size_t m,
                      std::size_t stride, std::size_t num) {
    if (num == 1) return multiply_ranks<T, 1, first>(out, l, r, m, stride);
    if (num == 2) return multiply_ranks<T, 2, first>(out, l, r, m, stride);
    if (num == 3) return multiply_ranks<T, 3, first>(out, l, r, m, stride);
    multiply_ranks<T, 4, first>(out, l, r, m, stride);
}

// Tiles of columns, whose part of `right` stays in the cache over all rows.
template <class T>
void multiply_loop(void* target, const void* left, const void* right, std::size_t n, std::size_t m,
                   std::size_t rank) {
    constexpr std::size_t tile = 1024;
    auto* out = static_cast<Any<T>*>(target);
    const auto* l = static_cast<const Any<T>*>(left);
    const auto* r = static_cast<const Any<T>*>(right);
    for (std::size_t at = 0; at < m; at += tile) {
        const std::size_t width = m - at < tile ? m - at : tile;
        for (std::size_t i = 0; i < n; ++i) {
            auto* row = out + i * m + at;
            multiply_up_to_4<T, true>(row, l + i * rank, r + at, width, m, rank < 4 ? rank : 4);
            for (std::size_t k = 4; k < rank; k += 4) {
                const std::size_t num = rank - k < 4 ? rank - k : 4;
                multiply_up_to_4<T, false>(row, l + i * rank + k, r + k * m + at, width, m, num);
            }
        }
    }
}

// -- magnitudes, as integers (see encode_block)

// The maxima of groups of 16 magnitudes: of each whole 256 values the 16 columns, and each of the
// values behind those by itself.
void group_maxima(u32* maxima, const void* values, std::size_t count) {
    const auto* in = static_cast<const Any<u32>*>(values);
    std::size_t i = 0;
    for (; i + 256 <= count; i += 256, maxima += 16) {
        u32 columns[16] = {};
        for (std::size_t row = 0; row < 256; row += 16) {
            POTLUCK_LOOP
            for (std::size_t j = 0; j < 16; ++j) {
                const u32 magnitude = in[i + row + j].value & 0x7fffffffu;
                columns[j] = magnitude > columns[j] ? magnitude : columns[j];
            }
        }
        __builtin_memcpy(maxima, columns, sizeof columns);
    }
    for (; i < count; ++i) *maxima++ = in[i].value & 0x7fffffffu;
}

// Counted in 32 bits, as wide as the values: count < 2^32.
std::size_t count_at_least(const u32* magnitudes, std::size_t count, u32 bound) {
    u32 found = 0;
    POTLUCK_LOOP
    for (std::size_t i = 0; i < count; ++i) found += magnitudes[i] >= bound ? 1u : 0u;
    return found;
}

std::size_t collect(u32* positions, u32* magnitudes, const void* values, std::size_t count,
                    u32 bound) {
    const auto* in = static_cast<const Any<u32>*>(values);
    std::size_t found = 0, i = 0;
#if defined(__AVX512F__)
    const __m512i least = _mm512_set1_epi32(static_cast<int>(bound));
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    for (; i + 16 <= count; i += 16) {
        const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(in + i), no_sign);
        u32 hits = _mm512_cmpge_epu32_mask(magnitude, least);
        for (; hits != 0; hits &= hits - 1) {
            const std::size_t at = i + static_cast<std::size_t>(__builtin_ctz(hits));
            positions[found] = static_cast<u32>(at);
            magnitudes[found++] = in[at].value & 0x7fffffffu;
        }
    }
#elif defined(__AVX2__)
    // Signed comparison serves: neither magnitudes nor the bound have a sign bit.
    const __m256i below = _mm256_set1_epi32(static_cast<int>(bound) - 1);
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    for (; i + 8 <= count; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
        const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(bits, no_sign), below);
        u32 hits = static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(above)));
        for (; hits != 0; hits &= hits - 1) {
            const std::size_t at = i + static_cast<std::size_t>(__builtin_ctz(hits));
            positions[found] = static_cast<u32>(at);
            magnitudes[found++] = in[at].value & 0x7fffffffu;
        }
    }
#endif
    for (; i < count; ++i) {
        const u32 magnitude = in[i].value & 0x7fffffffu;
        if (magnitude < bound) continue;
        positions[found] = static_cast<u32>(i);
        magnitudes[found++] = magnitude;
    }
    return found;
}

// -- the table

template <class T>
void fill_numbers(Kernels& table, Dtype dtype) {
    auto& row = table.combine[static_cast<int>(dtype)];
    row[static_cast<int>(Op::min)] = combine_loop<T, Min>;
    row[static_cast<int>(Op::max)] = combine_loop<T, Max>;
}

// Sums, products and bitwise operations give the same bits for signed and unsigned integers. They
// are done on unsigned ones, because an overflow of signed integers is undefined behaviour in C++.
template <class Signed, class Unsigned>
void fill_integers(Kernels& table, Dtype dtype_signed, Dtype dtype_unsigned) {
    fill_numbers<Signed>(table, dtype_signed);
    fill_numbers<Unsigned>(table, dtype_unsigned);
    for (const Dtype dtype : {dtype_signed, dtype_unsigned}) {
        auto& row = table.combine[static_cast<int>(dtype)];
        row[static_cast<int>(Op::sum)] = combine_loop<Unsigned, Sum>;
        table.combine_into_both[static_cast<int>(dtype)] = combine_into_both_loop<Unsigned, Sum>;
        table.combine_many[static_cast<int>(dtype)] = combine_many_loop<Unsigned, Sum>;
        row[static_cast<int>(Op::product)] = combine_loop<Unsigned, Product>;
        row[static_cast<int>(Op::band)] = combine_loop<Unsigned, Band>;
        row[static_cast<int>(Op::bor)] = combine_loop<Unsigned, Bor>;
        row[static_cast<int>(Op::bxor)] = combine_loop<Unsigned, Bxor>;
    }
}

// Two uint16 are promoted to int, whose product could overflow (65535^2 > 2^31).
struct Product16 {
    static u16 of(u16 a, u16 b) { return static_cast<u16>(u32{a} * u32{b}); }
};

template <class T>
void fill_floats(Kernels& table, Dtype dtype) {
    fill_numbers<T>(table, dtype);
    auto& row = table.combine[static_cast<int>(dtype)];
    row[static_cast<int>(Op::sum)] = combine_loop<T, Sum>;
    row[static_cast<int>(Op::product)] = combine_loop<T, Product>;
    table.combine_into_both[static_cast<int>(dtype)] = combine_into_both_loop<T, Sum>;
    table.combine_many[static_cast<int>(dtype)] = combine_many_loop<T, Sum>;
    table.divide[static_cast<int>(dtype)] = divide_loop<T>;
}

template <class H, class Least, class Most>
void fill_halves(Kernels& table, Dtype dtype, Half& half) {
    auto& row = table.combine[static_cast<int>(dtype)];
    row[static_cast<int>(Op::sum)] = combine_half<H, Sum>;
    row[static_cast<int>(Op::product)] = combine_half<H, Product>;
    row[static_cast<int>(Op::min)] = combine_half<H, Least>;
    row[static_cast<int>(Op::max)] = combine_half<H, Most>;
    table.divide[static_cast<int>(dtype)] = divide_half<H>;
    half = {widen_loop<H>, narrow_loop<H>, widen_combine<H, Sum>, widen_combine<H, Product>};
}

template <class T>
void fill_complex(Kernels& table, Dtype dtype) {
    auto& row = table.combine[static_cast<int>(dtype)];
    row[static_cast<int>(Op::sum)] = complex_sum<T>;
    row[static_cast<int>(Op::product)] = complex_product<T>;
    table.divide[static_cast<int>(dtype)] = divide_complex<T>;
}

Kernels fill(const char* name) {
    Kernels table;
    table.name = name;
    fill_halves<Float16, MinFirst, MaxFirst>(table, Dtype::float16, table.float16);
    fill_halves<Bfloat16, Min, Max>(table, Dtype::bfloat16, table.bfloat16);
    fill_floats<float>(table, Dtype::float32);
    fill_floats<double>(table, Dtype::float64);
    fill_integers<std::int8_t, u8>(table, Dtype::int8, Dtype::uint8);
    fill_integers<std::int16_t, u16>(table, Dtype::int16, Dtype::uint16);
    fill_integers<std::int32_t, u32>(table, Dtype::int32, Dtype::uint32);
    fill_integers<std::int64_t, u64>(table, Dtype::int64, Dtype::uint64);
    for (const Dtype dtype : {Dtype::int16, Dtype::uint16}) {
        table.combine[static_cast<int>(dtype)][static_cast<int>(Op::product)] =
            combine_loop<u16, Product16>;
    }
    // A bool is a byte, 0 or 1: sum and maximum are "or", product and minimum "and".
    const Combine either = combine_loop<u8, Bor>, both = combine_loop<u8, Band>;
    const Combine bits[num_ops] = {either, both, either, both, both, either, combine_loop<u8, Bxor>};
    for (int op = 0; op < num_ops; ++op) {
        table.combine[static_cast<int>(Dtype::boolean)][op] = bits[op];
    }
    fill_complex<float>(table, Dtype::complex64);
    fill_complex<double>(table, Dtype::complex128);
    table.largest_half = largest_half;
    table.encode_block = encode_block;
    table.decode_block = decode_block<false>;
    table.decode_add_block = decode_block<true>;
    table.pack4 = {pack_block<4>, unpack_block<4>};
    table.pack2 = {pack_block<2>, unpack_block<2>};
    table.keep_lost = keep_lost;
    table.group_maxima = group_maxima;
    table.count_at_least = count_at_least;
    table.collect = collect;
    table.multiply[static_cast<int>(Dtype::float32)] = multiply_loop<float>;
    table.multiply[static_cast<int>(Dtype::float64)] = multiply_loop<double>;
    return table;
}

}  // namespace
}  // namespace potluck
