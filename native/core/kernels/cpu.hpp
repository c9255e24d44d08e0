// Features of the processor, detected once at run time, so that one build serves all machines.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace potluck {

struct Cpu {
    bool avx2 = false;        // with FMA and F16C, as every AVX2 machine has them
    bool avx512 = false;      // F, BW, DQ and VL, and the operating system saves their registers
    bool neon = false;        // always there on aarch64
    std::size_t last_cache = 0;  // bytes of the last-level cache, which cores share
};

const Cpu& cpu();

// The names of the features that were found, for people.
std::vector<std::string> cpu_features();

}  // namespace potluck
