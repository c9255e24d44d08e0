// The kernels for every processor of the architecture: SSE2 on x86-64, NEON on aarch64.
#include "core/kernels/kernels_impl.hpp"

namespace potluck {

const Kernels* kernels_base() {
    static const Kernels table = fill("base");
    return &table;
}

}  // namespace potluck
