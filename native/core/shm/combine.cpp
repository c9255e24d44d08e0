#include "core/shm/combine.hpp"

#include <algorithm>
#include <cstring>

#include "core/kernels/reduce.hpp"
#include "core/shm/layout.hpp"

namespace potluck::shm {

namespace {

// A sum is divided tile by tile, while the tile is still in the L1 cache.
constexpr std::size_t TILE_BYTES = 8192;

}  // namespace

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
    const void* parts[MAX_WORLD];
    for (std::size_t at = 0; at < count; at += TILE_BYTES / size) {
        const std::size_t length = std::min(TILE_BYTES / size, count - at);
        for (std::size_t i = 0; i < num_sources; ++i) {
            parts[i] = static_cast<const char*>(sources[i]) + at * size;
        }
        char* total = static_cast<char*>(target) + at * size;
        combine_many(what.dtype, what.op, total, parts, num_sources, length);
        divide(what.dtype, total, length, num_sources);
    }
    if (also != nullptr) std::memcpy(also, target, count * size);
}

}  // namespace potluck::shm
