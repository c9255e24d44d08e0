// Sleeping until a word in memory changes (a futex), also when another process changes it.
//
// Systems other than Linux have no futex between processes; there a sleeper polls the word, with
// increasing pauses.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace potluck::shm {

using Word = std::atomic<std::uint32_t>;

// A word, and the value that it had before its reader decided to sleep. If the word has changed
// since, the sleep ends at once: no wake-up is lost between the two.
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

// Let another runnable thread have this core.
void yield();

// Sleep while `*watch.word == watch.seen`, at most `timeout_ns`. May return early (a signal, or a
// wake-up that was meant for an earlier sleep), so callers check what they wait for in a loop.
void sleep_on(Watch watch, std::int64_t timeout_ns);

// The same for several words: returns when any of them has changed.
void sleep_on_any(const Watch* watches, int num, std::int64_t timeout_ns);

// Wake all that sleep on `word`, in any process. The caller has changed it.
void wake_all(Word& word);

// A hint to the processor that this is a spinning wait.
inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    asm volatile("yield");
#endif
}

}  // namespace potluck::shm
