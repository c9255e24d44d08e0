// Element-wise reduction of contributions. The twin: src/potluck/_core/engine/arrays/reduction.py.
//
// Pointers need no alignment. Results equal those of NumPy (of ml_dtypes for bfloat16) bit for bit,
// with two exceptions: the sign and payload of a NaN, in which NumPy itself varies, and the last
// place of a complex product, which NumPy computes with fused multiply-adds where the processor has
// them. min and max of NaN and anything are NaN; of zeros of both signs they give the zero that
// NumPy gives on x86: the second (the first for float16).
#pragma once

#include <cstddef>

#include "core/kernels/dtype.hpp"

namespace potluck {

// Whether the operation is defined for the dtype: bitwise operations on floats and the order of
// complex numbers are not.
bool has_combine(Dtype dtype, Op op);

// target[i] = op(target[i], source[i]). The two may be the same memory, else must not overlap.
void combine(Dtype dtype, Op op, void* target, const void* source, std::size_t count);

// target[i] = op(a[i], b[i]). target may be a or b.
void combine_into(Dtype dtype, Op op, void* target, const void* a, const void* b,
                  std::size_t count);

// also[i] = target[i] = op(a[i], b[i]). Each may be a or b.
void combine_into_both(Dtype dtype, Op op, void* target, void* also, const void* a, const void* b,
                   std::size_t count);

// target[i] = op(...op(op(sources[0][i], sources[1][i]), sources[2][i])...), from left to right.
// float16 and bfloat16 sums and products are accumulated in float32 and rounded once, at the end.
// target may be sources[0], or the other one of two; not another one. num_sources >= 1.
void combine_many(Dtype dtype, Op op, void* target, const void* const* sources,
                  std::size_t num_sources, std::size_t count);

// Whether `divide` is defined: for float and complex types.
bool has_divide(Dtype dtype);

// target[i] = source[i] / divisor, in the array's type: the last step of a mean. As `Divide`.
void divide(Dtype dtype, void* target, const void* source, std::size_t count, double divisor);

// The mean of the sources: their sum as of `combine_many`, divided by their number. Where that sum
// overflows although all sources are finite, the mean is computed in a wider range, and is finite.
// target may be any source.
void average(Dtype dtype, void* target, const void* const* sources, std::size_t num_sources,
             std::size_t count);

// target[i] = source[i], from float32 to a 16-bit float, rounded to nearest even.
void narrow(Dtype dtype, void* target, const void* source, std::size_t count);

// Replaces every NaN by the canonical quiet NaN. No effect on types without NaN.
void canonicalize_nans(Dtype dtype, void* array, std::size_t count);

}  // namespace potluck
