// The kernels for processors with AVX-512. The build compiles this file with their flags, so
// nothing of it, not even its one function, may run before cpu() has been asked.
#if defined(__AVX512BW__)

#include "core/kernels/kernels_impl.hpp"

namespace potluck {

const Kernels* kernels_avx512() {
    static const Kernels table = fill("avx512");
    return &table;
}

}  // namespace potluck

#else

#include "core/kernels/kernels.hpp"

namespace potluck {

const Kernels* kernels_avx512() { return nullptr; }

}  // namespace potluck

#endif
