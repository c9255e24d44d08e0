#include "core/shm/wait.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace potluck::shm {

namespace {

constexpr std::int64_t MIN_SLEEP_NS = 1'000;
constexpr std::int64_t MAX_SLEEP_NS = 1'000'000;

bool all_unchanged(const Watch* watches, int num) {
    return std::all_of(watches, watches + num, [](const Watch& watch) {
        return watch.word->load(std::memory_order_acquire) == watch.seen;
    });
}

// For systems without futexes, and kernels without futex_waitv (Linux before 5.16): yield once,
// then poll with exponential backoff.
void poll_with_backoff(const Watch* watches, int num, std::int64_t timeout_ns) {
    const std::int64_t until = now_ns() + timeout_ns;
    std::int64_t length = 0;
    while (all_unchanged(watches, num)) {
        const std::int64_t left = until - now_ns();
        if (left <= 0) return;
        if (length == 0) {
            std::this_thread::yield();
            length = MIN_SLEEP_NS;
            continue;
        }
        std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(length, left)));
        length = std::min(2 * length, MAX_SLEEP_NS);
    }
}

#if defined(__linux__)
#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

// struct futex_waitv of linux/futex.h, which older headers lack.
struct WaitEntry {
    std::uint64_t value;
    std::uint64_t address;
    std::uint32_t flags;
    std::uint32_t reserved;
};

constexpr std::uint32_t SIZE_32 = 2;
constexpr int MAX_WORDS = 128;
#endif

}  // namespace

std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

int usable_cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

int current_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

void yield() { std::this_thread::yield(); }

void sleep_on(Watch watch, std::int64_t timeout_ns) {
    if (timeout_ns <= 0) return;
#if defined(__linux__)
    timespec limit{static_cast<time_t>(timeout_ns / 1'000'000'000),
                   static_cast<long>(timeout_ns % 1'000'000'000)};
    // Not FUTEX_WAIT_PRIVATE: sleeper and waker are processes that map the word at different
    // addresses, and a private futex is found by its address within one process.
    syscall(SYS_futex, watch.word, FUTEX_WAIT, watch.seen, &limit, nullptr, 0);
#else
    poll_with_backoff(&watch, 1, timeout_ns);
#endif
}

void sleep_on_any(const Watch* watches, int num, std::int64_t timeout_ns) {
    if (num == 1) {
        sleep_on(*watches, timeout_ns);
        return;
    }
    if (timeout_ns <= 0) return;
#if defined(__linux__)
    if (num <= MAX_WORDS) {
        WaitEntry entries[MAX_WORDS];
        for (int i = 0; i < num; ++i) {
            entries[i] = {watches[i].seen, reinterpret_cast<std::uint64_t>(watches[i].word),
                          SIZE_32, 0};
        }
        timespec until{};  // futex_waitv takes a moment, where futex takes a duration
        clock_gettime(CLOCK_MONOTONIC, &until);
        const std::int64_t at = until.tv_nsec + timeout_ns;
        until.tv_sec += static_cast<time_t>(at / 1'000'000'000);
        until.tv_nsec = static_cast<long>(at % 1'000'000'000);
        const long result =
            syscall(SYS_futex_waitv, entries, num, 0, &until, static_cast<long>(CLOCK_MONOTONIC));
        // ENOSYS: an older kernel. EPERM: a seccomp filter of a container. All else ends the sleep
        // (EAGAIN: a word has changed; EINTR; ETIMEDOUT).
        if (result >= 0 || (errno != ENOSYS && errno != EPERM)) return;
    }
#endif
    poll_with_backoff(watches, num, timeout_ns);
}

void wake_all(Word& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
#else
    (void)word;  // sleepers poll
#endif
}

}  // namespace potluck::shm
