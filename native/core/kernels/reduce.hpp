// Combining contributions element by element. The twin: src/potluck/engine/arrays/reduction.py.
//
// Pointers need no alignment. Results are those of NumPy (ml_dtypes for bfloat16) bit by bit, with two
// exceptions: which NaN a NaN is (sign and payload; NumPy itself gives one or the other), and the last
// place of a complex product (NumPy fuses there where the processor can). min and max of NaN and
// anything are NaN; of zeros of both signs they are the one that NumPy gives on x86: the second (the
// first for float16).
#pragma once

#include <cstddef>

#include "core/kernels/dtype.hpp"

namespace potluck {

// Whether the combination has a meaning: bits of floats and the order of complex numbers have none.
bool has_combine(Dtype dtype, Op op);

// target[i] = op(target[i], source[i]). The two may be the same memory, else must not overlap.
void combine(Dtype dtype, Op op, void* target, const void* source, std::size_t count);

// target[i] = op(a[i], b[i]). target may be a or b.
void combine_into(Dtype dtype, Op op, void* target, const void* a, const void* b,
                  std::size_t count);

// also[i] = target[i] = op(a[i], b[i]). Each may be a or b.
void combine_twice(Dtype dtype, Op op, void* target, void* also, const void* a, const void* b,
                   std::size_t count);

// target[i] = op(...op(op(sources[0][i], sources[1][i]), sources[2][i])...), from left to right.
// float16 and bfloat16 sums and products are accumulated in float32 and rounded once, at the end.
// target may be sources[0], or the other one of two; not another one. num_sources >= 1.
void combine_many(Dtype dtype, Op op, void* target, const void* const* sources,
                  std::size_t num_sources, std::size_t count);

// Whether `divide` has a meaning: for float and complex types.
bool has_divide(Dtype dtype);

// array[i] /= divisor, in the array's type: how a mean ends.
void divide(Dtype dtype, void* array, std::size_t count, std::size_t divisor);

// Every NaN becomes the one NaN. Other types than floats and complex numbers have none.
void make_nans_alike(Dtype dtype, void* array, std::size_t count);

}  // namespace potluck
