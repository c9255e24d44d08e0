// The k values of largest magnitude, exactly. The twin is src/potluck/compressors/topk.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace potluck {

// Of each chunk of `chunk` float32 values (the last one may be shorter) the `k` of largest
// magnitude (of the last chunk `last_k`): their positions in the whole array, ascending, and their
// values. Of equal magnitudes the first are taken; NaN counts as larger than infinity.
//
// With a residual (error feedback) the values are source + residual, which `residual` holds
// afterwards; the caller subtracts what is sent. Without, `residual` is null. count < 2^32.
void select_largest(std::uint32_t* positions, void* values, const void* source, void* residual,
                    std::size_t count, std::size_t chunk, std::size_t k, std::size_t last_k);

}  // namespace potluck
