#include "core/kernels/kernels.hpp"

#include <atomic>
#include <stdexcept>

#include "core/kernels/cpu.hpp"

namespace potluck {

namespace {

// The tables that run on this machine, the best last.
std::vector<const Kernels*> sets() {
    std::vector<const Kernels*> found{kernels_base()};
    const auto add = [&found](const Kernels* table) {
        if (table != nullptr) found.push_back(table);
    };
    if (cpu().avx2) add(kernels_avx2());
    if (cpu().avx512) add(kernels_avx512());
    return found;
}

std::atomic<const Kernels*>& current() {
    static std::atomic<const Kernels*> table{sets().back()};
    return table;
}

}  // namespace

// Relaxed: the tables themselves are constant.
const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

std::vector<std::string> kernel_sets() {
    std::vector<std::string> names;
    for (const Kernels* table : sets()) names.emplace_back(table->name);
    return names;
}

void use_kernel_set(const std::string& name) {
    for (const Kernels* table : sets()) {
        if (name == table->name) {
            current().store(table, std::memory_order_relaxed);
            return;
        }
    }
    throw std::invalid_argument("no kernels for " + name + " on this machine");
}

}  // namespace potluck
