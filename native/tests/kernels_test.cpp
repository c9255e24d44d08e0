// Tests of the kernels without Python: exhaustive over 16-bit floats, and one digest of all other
// results.
//
// Results must not depend on the processor, so the digest is a constant: every instruction set of
// every architecture must give it. (That the bits are those of NumPy is tested in Python.)
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/kernels/codec.hpp"
#include "core/kernels/kernels.hpp"
#include "core/kernels/reduce.hpp"

using namespace potluck;

namespace {

constexpr uint32_t expected_digest = 0x225cb467;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

// The value of 16 bits by the definition of IEEE 754: sign, exponent, fraction.
double value_of(uint16_t bits, int exponent_bits) {
    const int fraction_bits = 15 - exponent_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
    return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

void check_half(const Half& half, int exponent_bits) {
    std::vector<uint16_t> all(65536), back(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(all.size());
    half.widen(wide.data(), all.data(), all.size());
    half.narrow(back.data(), wide.data(), wide.size());
    for (size_t i = 0; i < all.size(); ++i) {
        const double value = value_of(all[i], exponent_bits);
        if (std::isnan(value)) {
            CHECK(std::isnan(wide[i]) && std::isnan(value_of(back[i], exponent_bits)));
        } else {
            CHECK(wide[i] == value && std::signbit(wide[i]) == std::signbit(value));
            CHECK(back[i] == all[i]);
        }
    }
    // The middle between two neighbours is rounded to the even one; the next float32 below and
    // above the middle to the nearer one.
    const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
    for (uint16_t low = 0; low + 1 < infinity; ++low) {
        const auto middle = static_cast<float>(
            (value_of(low, exponent_bits) + value_of(static_cast<uint16_t>(low + 1), exponent_bits)) / 2);
        const float three[] = {std::nextafterf(middle, 0.0f), middle, std::nextafterf(middle, INFINITY)};
        uint16_t to[3];
        half.narrow(to, three, 3);
        // Where float32 has no value between the middle and a neighbour there is nothing to test.
        if (middle == 0 || three[0] <= wide[low] || three[2] >= wide[low + 1]) continue;
        CHECK(to[0] == low && to[2] == low + 1);
        CHECK(to[1] == (low & 1 ? low + 1 : low));
    }
}

// Pseudo-random bits (xorshift), the same on every machine.
void fill(std::vector<uint8_t>& memory, uint64_t seed) {
    for (uint8_t& byte : memory) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        byte = static_cast<uint8_t>(seed >> 32);
    }
}

bool is_nan(Dtype dtype, const uint8_t* at) {
    uint64_t bits = 0;
    switch (dtype) {
        case Dtype::float16: std::memcpy(&bits, at, 2); return (bits & 0x7fff) > 0x7c00;
        case Dtype::bfloat16: std::memcpy(&bits, at, 2); return (bits & 0x7fff) > 0x7f80;
        case Dtype::float32:
        case Dtype::complex64: std::memcpy(&bits, at, 4); return (bits & 0x7fffffff) > 0x7f800000;
        case Dtype::float64:
        case Dtype::complex128:
            std::memcpy(&bits, at, 8);
            return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
        default: return false;
    }
}

// FNV-1a, continued from `digest`.
uint32_t fnv1a(uint32_t digest, const std::vector<uint8_t>& bytes) {
    for (const uint8_t byte : bytes) digest = (digest ^ byte) * 0x01000193u;
    return digest;
}

// All NaNs count as equal: their sign and payload depend on the processor.
uint32_t digest_of(uint32_t digest, Dtype dtype, std::vector<uint8_t> values) {
    const bool is_complex = dtype == Dtype::complex64 || dtype == Dtype::complex128;
    const size_t item = item_bytes(dtype) / (is_complex ? 2 : 1);
    for (size_t at = 0; at + item <= values.size(); at += item) {
        if (is_nan(dtype, values.data() + at)) std::memset(values.data() + at, 0xff, item);
    }
    return fnv1a(digest, values);
}

// Both results of `combine_into_both`, over its sources or in other memory, equal `combine_into`'s.
void check_into_both(Dtype dtype, Op op, const std::vector<std::vector<uint8_t>>& memory,
                 const std::vector<uint8_t>& expected, size_t count) {
    std::vector<uint8_t> a = memory[0], b = memory[1], out(expected.size()), also(expected.size());
    const auto same = [&](const uint8_t* found) {
        const std::vector<uint8_t> values(found, found + expected.size());
        return digest_of(0, dtype, values) == digest_of(0, dtype, expected);
    };
    combine_into_both(dtype, op, out.data(), also.data(), a.data(), b.data() + 1, count);
    CHECK(same(out.data()) && out == also);
    combine_into_both(dtype, op, b.data() + 1, a.data(), a.data(), b.data() + 1, count);
    CHECK(same(a.data()) && same(b.data() + 1));
}

// `combine_many` of 2 to 9 sources equals combining two at a time, also over the first source.
void check_many(Dtype dtype, Op op, const std::vector<const void*>& sources, size_t count) {
    const size_t size = count * item_bytes(dtype);
    // combine_many rounds 16-bit floats once, two at a time would round in each step.
    const bool is_half = dtype == Dtype::float16 || dtype == Dtype::bfloat16;
    if (is_half || size == 0) return;
    for (size_t num = 2; num <= 9; ++num) {
        std::vector<const void*> all;
        for (size_t i = 0; i < num; ++i) all.push_back(sources[i % sources.size()]);
        std::vector<uint8_t> expected(size), out(size), first(size);
        std::memcpy(expected.data(), all[0], size);
        std::memcpy(first.data(), all[0], size);
        for (size_t i = 1; i < num; ++i) combine(dtype, op, expected.data(), all[i], count);
        combine_many(dtype, op, out.data(), all.data(), num, count);
        all[0] = first.data();
        combine_many(dtype, op, first.data(), all.data(), num, count);
        CHECK(out == first);
        CHECK(digest_of(0, dtype, out) == digest_of(0, dtype, expected));
    }
}

uint32_t digest() {
    uint32_t total = 0;
    for (int code = 1; code < num_dtypes; ++code) {
        const auto dtype = static_cast<Dtype>(code);
        const size_t item = item_bytes(dtype);
        for (const size_t count : {0, 1, 7, 64, 1001}) {
            std::vector<std::vector<uint8_t>> memory(4, std::vector<uint8_t>(count * item + 3));
            std::vector<const void*> sources;
            for (size_t i = 0; i < memory.size(); ++i) {
                fill(memory[i], 0x9e3779b97f4a7c15u + 97 * i + count + static_cast<size_t>(code));
                if (dtype == Dtype::boolean) {
                    for (uint8_t& byte : memory[i]) byte &= 1;
                }
                sources.push_back(memory[i].data() + i);  // aligned to nothing
            }
            for (int number = 0; number < num_ops; ++number) {
                const auto op = static_cast<Op>(number);
                if (!has_combine(dtype, op)) continue;
                std::vector<uint8_t> out(count * item);
                combine_into(dtype, op, out.data(), sources[0], sources[1], count);
                total = digest_of(total, dtype, out);
                check_into_both(dtype, op, memory, out, count);
                check_many(dtype, op, sources, count);
                combine_many(dtype, op, out.data(), sources.data(), sources.size(), count);
                total = digest_of(total, dtype, out);
                if (has_divide(dtype)) {
                    divide(dtype, out.data(), out.data(), count, 3);
                    total = digest_of(total, dtype, out);
                }
            }
            if (dtype != Dtype::float32) continue;
            for (const Codec codec :
                 {Codec::fp16, Codec::bf16, Codec::int8, Codec::int4, Codec::int2}) {
                std::vector<float> plain(count), sum(count, 1.5f);
                for (size_t i = 0; i < count; ++i) {
                    plain[i] = static_cast<float>(static_cast<const uint8_t*>(sources[0])[i]) / 7 - 15;
                }
                std::vector<uint8_t> encoded(encoded_bytes(codec, count));
                std::vector<uint8_t> values(4 * count);
                encode(codec, encoded.data(), plain.data(), count);
                total = fnv1a(total, encoded);
                decode_accumulate(codec, sum.data(), encoded.data(), count);
                if (count > 0) std::memcpy(values.data(), sum.data(), values.size());
                total = digest_of(total, Dtype::float32, values);
                encode_with_residual(codec, encoded.data(), sum.data(), plain.data(), count);
                if (count > 0) std::memcpy(values.data(), sum.data(), values.size());
                total = digest_of(total, Dtype::float32, values);
            }
        }
    }
    return total;
}

}  // namespace

int main() {
    for (const std::string& name : kernel_sets()) {
        use_kernel_set(name);
        check_half(kernels().float16, 5);
        check_half(kernels().bfloat16, 8);
        const uint32_t found = digest();
        std::printf("kernels: %s: digest %08x\n", name.c_str(), found);
        CHECK(found == expected_digest);
    }
    std::puts("kernels: all checks passed");
    return 0;
}
