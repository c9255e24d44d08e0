// The kernels for processors with AVX2. The build compiles this file with their flags, so nothing
// of it, not even its one function, may run before cpu() has been asked.
#if defined(__AVX2__)

#include "core/kernels/kernels_impl.hpp"

namespace potluck {

const Kernels* kernels_avx2() {
    static const Kernels table = fill("avx2");
    return &table;
}

}  // namespace potluck

#else

#include "core/kernels/kernels.hpp"

namespace potluck {

const Kernels* kernels_avx2() { return nullptr; }

}  // namespace potluck

#endif
