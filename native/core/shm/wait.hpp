// Sleeping until a word in memory changes, also when another process changes it.
//
// Linux has the futex for this. Elsewhere a sleeper looks again and again, less and less often.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace potluck::shm {

using Word = std::atomic<std::uint32_t>;

// A word, and the value it had when its reader decided to sleep.
struct Watch {
    Word* word;
    std::uint32_t seen;
};

// Monotonic nanoseconds.
std::int64_t now_ns();

// How many processors this process may use.
int usable_cores();

// The processor that this thread runs on now, -1 where the system does not tell.
int current_core();

// Let another thread that could run have this core.
void yield();

// Sleep while `*watch.word == watch.seen`, at most `timeout_ns`. May return early.
void sleep_on(Watch watch, std::int64_t timeout_ns);

// The same for several words: returns when any of them has changed.
void sleep_on_any(const Watch* watches, int num, std::int64_t timeout_ns);

// Wake all that sleep on `word`, in any process. The caller has changed it.
void wake_all(Word& word);

// Tell the processor that this is a spinning wait.
inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    asm volatile("yield");
#endif
}

}  // namespace potluck::shm
