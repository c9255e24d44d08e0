// The parts of the extension module: each bind_*.cpp registers one part of the core.
#pragma once

#include <nanobind/nanobind.h>

namespace potluck::bind {

// One line per bind_*.cpp; called by binding.cpp.
void kernels(nanobind::module_& m);
void shared_memory(nanobind::module_& m);
void loop(nanobind::module_& m);

}  // namespace potluck::bind
