#include "core/shm/combine.hpp"

#include <cstring>

#include "core/kernels/reduce.hpp"

namespace potluck::shm {

bool has_combination(const Combination& what) {
    return has_combine(what.dtype, what.op) && (!what.is_mean || has_divide(what.dtype));
}

void combine_all(const Combination& what, void* target, const void* const* sources, int num,
                 std::size_t count, void* also) {
    const auto num_sources = static_cast<std::size_t>(num);
    const std::size_t size = item_bytes(what.dtype);
    if (!what.is_mean) {
        // One pass only for two sources; with more, two stores in one pass measured slower than a
        // copy of the tile afterwards.
        if (num == 2 && also != nullptr) {
            return combine_into_both(what.dtype, what.op, target, also, sources[0], sources[1],
                                     count);
        }
        combine_many(what.dtype, what.op, target, sources, num_sources, count);
        if (also != nullptr) std::memcpy(also, target, count * size);
        return;
    }
    average(what.dtype, target, sources, num_sources, count);
    if (also != nullptr) std::memcpy(also, target, count * size);
}

}  // namespace potluck::shm
