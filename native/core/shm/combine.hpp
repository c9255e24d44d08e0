// Reduction of all ranks' contributions to one part of a call, in the order of the ranks.
#pragma once

#include <cstddef>

#include "core/kernels/dtype.hpp"

namespace potluck::shm {

struct Combination {
    Dtype dtype = Dtype::uint8;
    Op op = Op::sum;
    bool is_mean = false;  // a sum that is divided by the number of sources
};

// Whether the operation is defined for the dtype.
bool has_combination(const Combination& what);

// `target[i] = op(...op(sources[0][i], sources[1][i])..., sources[num - 1][i])`. `target` may be
// `sources[0]`, or either of two sources; else it must not overlap the sources, because it is
// written before all of them have been read. `also`, if given, gets a copy of the target; it may be
// any source, but not the target.
void combine_all(const Combination& what, void* target, const void* const* sources, int num,
                 std::size_t count, void* also);

}  // namespace potluck::shm
