// Reductions by the names that Python passes (potluck._core.types.ReduceOp).
#pragma once

#include <nanobind/nanobind.h>

#include "core/kernels/dtype.hpp"

namespace potluck::bind {

struct Reduction {
    const char* name;
    Op op;
    bool is_mean = false;  // a sum that is divided by the number of ranks at the end
};

// Numbered as in fingerprints: REDUCTIONS in src/potluck/_core/engine/fingerprint.py. ShmEngine compares
// the two when it is made.
constexpr Reduction reductions[] = {
    {"sum", Op::sum},         {"mean", Op::sum, true}, {"min", Op::min},
    {"max", Op::max},         {"product", Op::product}, {"band", Op::band},
    {"bor", Op::bor},         {"bxor", Op::bxor},
};
constexpr int num_reductions = static_cast<int>(sizeof(reductions) / sizeof(Reduction));

// The index in `reductions`; -1 if `name` is not a string or no reduction.
inline int reduction_of(nanobind::handle name) {
    if (!PyUnicode_Check(name.ptr())) return -1;
    for (int i = 0; i < num_reductions; ++i) {
        if (PyUnicode_CompareWithASCIIString(name.ptr(), reductions[i].name) == 0) return i;
    }
    return -1;
}

// The same; ValueError instead of -1.
inline const Reduction& reduction_named(nanobind::handle name) {
    const int number = reduction_of(name);
    if (number < 0) throw nanobind::value_error("no such operation");
    return reductions[number];
}

}  // namespace potluck::bind
