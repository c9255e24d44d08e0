#include "core/reduce.hpp"

#include <algorithm>
#include <cstring>

#include "core/kernels.hpp"

namespace potluck {

namespace {

// Elements that are combined from all sources before the next ones are: they stay in the first cache.
constexpr std::size_t block_bytes = 8192;

Combine kernel(Dtype dtype, Op op) {
    return kernels().combine[static_cast<int>(dtype)][static_cast<int>(op)];
}

char* at(void* base, std::size_t offset) { return static_cast<char*>(base) + offset; }
const char* at(const void* base, std::size_t offset) {
    return static_cast<const char*>(base) + offset;
}

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

}  // namespace

bool has_combine(Dtype dtype, Op op) { return kernel(dtype, op) != nullptr; }

void combine(Dtype dtype, Op op, void* target, const void* source, std::size_t count) {
    kernel(dtype, op)(target, target, source, count);
}

void combine_into(Dtype dtype, Op op, void* target, const void* a, const void* b,
                  std::size_t count) {
    kernel(dtype, op)(target, a, b, count);
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
    const std::size_t block = block_bytes / item;
    for (std::size_t begin = 0; begin < count; begin += block) {
        const std::size_t n = std::min(block, count - begin);
        const std::size_t offset = begin * item;
        two(at(target, offset), at(sources[0], offset), at(sources[1], offset), n);
        for (std::size_t i = 2; i < num_sources; ++i) {
            two(at(target, offset), at(target, offset), at(sources[i], offset), n);
        }
    }
}

bool has_divide(Dtype dtype) { return kernels().divide[static_cast<int>(dtype)] != nullptr; }

void divide(Dtype dtype, void* array, std::size_t count, std::size_t divisor) {
    kernels().divide[static_cast<int>(dtype)](array, count, static_cast<double>(divisor));
}

}  // namespace potluck
