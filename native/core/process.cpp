#include "core/process.hpp"

#include <atomic>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace potluck {

namespace {

std::atomic<std::uint32_t> forks{0};

#ifndef _WIN32
// When the library is loaded. Not by Python's hooks, which a fork in C code does not call.
const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
#endif

}  // namespace

std::uint32_t num_forks() { return forks.load(std::memory_order_relaxed); }

}  // namespace potluck
