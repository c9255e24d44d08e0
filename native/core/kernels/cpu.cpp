#include "core/kernels/cpu.hpp"

#include <fstream>

namespace potluck {

namespace {

// Assumed where the system does not tell.
constexpr std::size_t USUAL_CACHE = std::size_t{32} << 20;

// The size of the last-level cache. From sysfs (as "32768K"), because sysconf gives the sum over
// all parts of some processors.
std::size_t last_cache() {
    std::size_t kib = 0;
    for (int index = 0;; ++index) {
        const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
        std::ifstream file(cache + "/size");
        if (!(file >> kib)) break;
    }
    return kib > 0 ? kib << 10 : USUAL_CACHE;
}

Cpu detect() {
    Cpu found;
    found.last_cache = last_cache();
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    __builtin_cpu_init();
    found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
#elif defined(__aarch64__)
    found.neon = true;
#endif
    return found;
}

}  // namespace

const Cpu& cpu() {
    static const Cpu found = detect();
    return found;
}

std::vector<std::string> cpu_features() {
    const Cpu& found = cpu();
    std::vector<std::string> names;
    if (found.avx2) names.emplace_back("avx2");
    if (found.avx512) names.emplace_back("avx512");
    if (found.neon) names.emplace_back("neon");
    return names;
}

}  // namespace potluck
