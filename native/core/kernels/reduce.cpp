#include "core/kernels/reduce.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/kernels/kernels.hpp"

namespace potluck {

namespace {

// Bytes of the target that are combined from all sources before the next ones are (loop tiling): so
// partial results stay in the L1 cache.
constexpr std::size_t block_bytes = 8192;

Combine kernel(Dtype dtype, Op op) {
    return kernels().combine[static_cast<int>(dtype)][static_cast<int>(op)];
}

char* at(void* base, std::size_t offset) { return static_cast<char*>(base) + offset; }
const char* at(const void* base, std::size_t offset) {
    return static_cast<const char*>(base) + offset;
}

// 16-bit floats: accumulated in float32 and rounded once, so the error does not grow with the
// number of sources.
void combine_many_wide(const Half& half, Op op, void* target, const void* const* sources,
                       std::size_t num_sources, std::size_t count) {
    constexpr std::size_t strip = 2048;
    float wide[strip];
    const Convert more = op == Op::sum ? half.widen_add : half.widen_multiply;
    for (std::size_t begin = 0; begin < count; begin += strip) {
        const std::size_t n = std::min(strip, count - begin);
        half.widen(wide, at(sources[0], 2 * begin), n);
        for (std::size_t i = 1; i < num_sources; ++i) more(wide, at(sources[i], 2 * begin), n);
        half.narrow(at(target, 2 * begin), wide, n);
    }
}

// By integers: a float is NaN if its magnitude bits are above those of infinity.
template <typename Bits>
void canonicalize(void* array, std::size_t count, Bits infinity, Bits nan) {
    const Bits magnitude = static_cast<Bits>(~Bits{0}) >> 1;
    for (std::size_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, at(array, i * sizeof(Bits)), sizeof(Bits));
        if ((bits & magnitude) > infinity) bits = nan;
        std::memcpy(at(array, i * sizeof(Bits)), &bits, sizeof(Bits));
    }
}

const Half& half_of(Dtype dtype) {
    return dtype == Dtype::float16 ? kernels().float16 : kernels().bfloat16;
}

// By integers: all bits of the exponent are set in infinities and NaN only.
template <typename Bits>
bool are_finite_bits(const void* array, std::size_t count, Bits exponent) {
    Bits found = 0;
    for (std::size_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, at(array, i * sizeof(Bits)), sizeof(Bits));
        found = static_cast<Bits>(found | ((bits & exponent) == exponent));
    }
    return found == 0;
}

// True for types that `wide_mean` does not know.
bool are_finite(Dtype dtype, const void* array, std::size_t count) {
    switch (dtype) {
        case Dtype::float16: return are_finite_bits<std::uint16_t>(array, count, 0x7c00);
        case Dtype::bfloat16: return are_finite_bits<std::uint16_t>(array, count, 0x7f80);
        case Dtype::float32: return are_finite_bits<std::uint32_t>(array, count, 0x7f800000);
        case Dtype::float64:
            return are_finite_bits<std::uint64_t>(array, count, 0x7ff0000000000000);
        default: return true;
    }
}

double get(Dtype dtype, const void* array, std::size_t index) {
    const char* const from = at(array, index * item_bytes(dtype));
    double exact;
    float value;
    if (dtype == Dtype::float64) {
        std::memcpy(&exact, from, sizeof exact);
        return exact;
    }
    if (dtype == Dtype::float32) std::memcpy(&value, from, sizeof value);
    else half_of(dtype).widen(&value, from, 1);
    return value;
}

void put(Dtype dtype, void* target, double value) {
    const float rounded = static_cast<float>(value);
    if (dtype == Dtype::float64) std::memcpy(target, &value, sizeof value);
    else if (dtype == Dtype::float32) std::memcpy(target, &rounded, sizeof rounded);
    else half_of(dtype).narrow(target, &rounded, 1);
}

// The mean of element `index` of all sources in a float64, whose range float64 itself needs a factor
// for. It is at most the largest of the sources, so rounding to their type does not overflow.
double wide_mean(Dtype dtype, const std::vector<const void*>& sources, std::size_t index) {
    const double scale = dtype == Dtype::float64 ? std::ldexp(1.0, -32) : 1.0;
    double sum = 0, largest = 0;
    for (const void* source : sources) {
        const double value = get(dtype, source, index);
        sum += value * scale;
        largest = std::max(largest, std::abs(value));
    }
    const double mean = sum / (static_cast<double>(sources.size()) * scale);
    return std::isfinite(sum) ? std::clamp(mean, -largest, largest) : mean;
}

}  // namespace

bool has_combine(Dtype dtype, Op op) { return kernel(dtype, op) != nullptr; }

void combine(Dtype dtype, Op op, void* target, const void* source, std::size_t count) {
    kernel(dtype, op)(target, target, source, count);
}

void combine_into(Dtype dtype, Op op, void* target, const void* a, const void* b,
                  std::size_t count) {
    kernel(dtype, op)(target, a, b, count);
}

void combine_into_both(Dtype dtype, Op op, void* target, void* also, const void* a, const void* b,
                   std::size_t count) {
    const CombineIntoBoth both = kernels().combine_into_both[static_cast<int>(dtype)];
    if (op == Op::sum && both != nullptr) return both(target, also, a, b, count);
    kernel(dtype, op)(target, a, b, count);
    if (count != 0) std::memcpy(also, target, count * item_bytes(dtype));
}

void combine_many(Dtype dtype, Op op, void* target, const void* const* sources,
                  std::size_t num_sources, std::size_t count) {
    const std::size_t item = item_bytes(dtype);
    if (num_sources == 1) {
        if (target != sources[0]) std::memcpy(target, sources[0], count * item);
        return;
    }
    const Combine two = kernel(dtype, op);
    if (num_sources == 2) return two(target, sources[0], sources[1], count);
    if (op == Op::sum || op == Op::product) {
        if (dtype == Dtype::float16) {
            return combine_many_wide(kernels().float16, op, target, sources, num_sources, count);
        }
        if (dtype == Dtype::bfloat16) {
            return combine_many_wide(kernels().bfloat16, op, target, sources, num_sources, count);
        }
    }
    const CombineMany many =
        op == Op::sum ? kernels().combine_many[static_cast<int>(dtype)] : nullptr;
    const std::size_t most = many != nullptr ? max_sources : 2, block = block_bytes / item;
    for (std::size_t begin = 0; begin < count; begin += block) {
        const std::size_t n = std::min(block, count - begin), offset = begin * item;
        void* const total = at(target, offset);
        for (std::size_t next = 0; next < num_sources;) {
            const void* some[max_sources];
            std::size_t num = 0;
            if (next > 0) some[num++] = total;
            while (num < most && next < num_sources) some[num++] = at(sources[next++], offset);
            if (num == 2) two(total, some[0], some[1], n);
            else many(total, some, num, n);
        }
    }
}

bool has_divide(Dtype dtype) { return kernels().divide[static_cast<int>(dtype)] != nullptr; }

void divide(Dtype dtype, void* target, const void* source, std::size_t count, double divisor) {
    kernels().divide[static_cast<int>(dtype)](target, source, count, divisor);
}

void average(Dtype dtype, void* target, const void* const* sources, std::size_t num_sources,
             std::size_t count) {
    if (dtype == Dtype::complex64 || dtype == Dtype::complex128) {  // the parts by themselves
        const Dtype part = dtype == Dtype::complex64 ? Dtype::float32 : Dtype::float64;
        return average(part, target, sources, num_sources, 2 * count);
    }
    // The sums are apart from the target, which may be a source, until they are known to be finite.
    alignas(64) char sums[block_bytes];
    const std::size_t item = item_bytes(dtype), block = block_bytes / item;
    std::vector<const void*> parts(num_sources);
    for (std::size_t begin = 0; begin < count; begin += block) {
        const std::size_t n = std::min(block, count - begin);
        for (std::size_t i = 0; i < num_sources; ++i) parts[i] = at(sources[i], begin * item);
        combine_many(dtype, Op::sum, sums, parts.data(), num_sources, n);
        char* const out = at(target, begin * item);
        if (are_finite(dtype, sums, n)) {
            divide(dtype, out, sums, n, static_cast<double>(num_sources));
            continue;
        }
        for (std::size_t i = 0; i < n; ++i) {
            char* const sum = sums + i * item;
            if (are_finite(dtype, sum, 1)) divide(dtype, sum, sum, 1, static_cast<double>(num_sources));
            else put(dtype, sum, wide_mean(dtype, parts, i));
        }
        std::memcpy(out, sums, n * item);
    }
}

void narrow(Dtype dtype, void* target, const void* source, std::size_t count) {
    half_of(dtype).narrow(target, source, count);
}

void canonicalize_nans(Dtype dtype, void* array, std::size_t count) {
    switch (dtype) {
        case Dtype::float16: return canonicalize<std::uint16_t>(array, count, 0x7c00, 0x7e00);
        case Dtype::bfloat16: return canonicalize<std::uint16_t>(array, count, 0x7f80, 0x7fc0);
        case Dtype::complex64: count *= 2; [[fallthrough]];
        case Dtype::float32: return canonicalize<std::uint32_t>(array, count, 0x7f800000, 0x7fc00000);
        case Dtype::complex128: count *= 2; [[fallthrough]];
        case Dtype::float64:
            return canonicalize<std::uint64_t>(array, count, 0x7ff0000000000000, 0x7ff8000000000000);
        default: return;
    }
}

}  // namespace potluck
