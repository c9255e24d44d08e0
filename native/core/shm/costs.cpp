#include "core/shm/costs.hpp"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/kernels/reduce.hpp"
#include "core/shm/copy.hpp"
#include "core/shm/wait.hpp"

#if defined(__linux__)
#include <sched.h>
#endif

namespace potluck::shm {

namespace {

constexpr std::int64_t PHASE_NS = 600'000;
// An answer that takes longer shows how busy the machine is, not how fast.
constexpr std::int64_t TIMEOUT_NS = 200'000;
constexpr std::size_t COUNT = 8192;

// How the two threads of a ping-pong wait for each other.
enum class Waiting { SPINNING, YIELDING, SLEEPING };

void wait_for_change(Waiting how, Word& word, std::uint32_t seen) {
    switch (how) {
        case Waiting::SPINNING:
            return relax();
        case Waiting::YIELDING:
            return yield();
        case Waiting::SLEEPING:
            return sleep_on({&word, seen}, TIMEOUT_NS);
    }
}

// The other thread of a ping-pong: answers each number with the same number. If `writes`, it first
// writes an array, so that the array's lines are Modified in its core's cache.
class Responder {
public:
    explicit Responder(Waiting how) : how_(how), written_(COUNT), thread_([this] { answer(); }) {}
    ~Responder() {
        is_over_.store(true);
        ask();
        thread_.join();
    }
    Responder(const Responder&) = delete;
    Responder& operator=(const Responder&) = delete;

    // Nanoseconds until the answer; -1 if it did not come in time.
    std::int64_t round() {
        const std::int64_t began = now_ns();
        const std::uint32_t number = ask();
        std::int64_t now = began;
        while (answered_.load(std::memory_order_acquire) != number) {
            now = now_ns();
            if (now - began > TIMEOUT_NS) return -1;
            wait_for_change(how_, answered_, number - 1);
        }
        return now_ns() - began;
    }
    float* written() { return written_.data(); }

    std::atomic<bool> writes{false};

private:
    std::uint32_t ask() {
        const std::uint32_t number = asked_.fetch_add(1) + 1;
        if (how_ == Waiting::SLEEPING || is_over_.load()) wake_all(asked_);
        return number;
    }
    void answer() {
        std::uint32_t seen = 0;
        while (!is_over_.load()) {
            if (asked_.load(std::memory_order_acquire) == seen) {
                wait_for_change(how_, asked_, seen);
                continue;
            }
            seen = asked_.load();
            if (writes.load()) std::fill(written_.begin(), written_.end(), 1.0f);
            answered_.store(seen, std::memory_order_release);
            if (how_ == Waiting::SLEEPING) wake_all(answered_);
        }
    }

    alignas(64) Word asked_{0};
    alignas(64) Word answered_{0};
    const Waiting how_;
    std::atomic<bool> is_over_{false};
    std::vector<float> written_;
    std::thread thread_;
};

// Pins this thread, and the threads that it starts, to the core that it runs on.
class PinnedToCore {
public:
#if defined(__linux__)
    PinnedToCore() {
        cpu_set_t one;
        CPU_ZERO(&one);
        const int core = sched_getcpu();
        if (core < 0 || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
        CPU_SET(static_cast<std::size_t>(core), &one);
        is_pinned = sched_setaffinity(0, sizeof one, &one) == 0;
    }
    ~PinnedToCore() {
        if (is_pinned) sched_setaffinity(0, sizeof before_, &before_);
    }
#endif
    bool is_pinned = false;

private:
#if defined(__linux__)
    cpu_set_t before_;
#endif
};

// The minimum of many runs of `once`, because other programs on the machine only add to a run; 0 if
// every run is negative (failed).
template <typename Once>
double least(Once once) {
    std::int64_t found = -1;
    const std::int64_t until = now_ns() + PHASE_NS;
    do {
        const std::int64_t took = once();
        if (took >= 0 && (found < 0 || took < found)) found = took;
    } while (now_ns() < until);
    return found < 0 ? 0 : static_cast<double>(found);
}

}  // namespace

Costs measure_costs() {
    Costs costs;
    {
        Responder responder(Waiting::SLEEPING);
        costs.wake_s = least([&] { return responder.round(); }) / 2e9;  // half a round trip
    }
    {
        const PinnedToCore here;
        Responder responder(Waiting::YIELDING);
        if (here.is_pinned) costs.turn_s = least([&] { return responder.round(); }) / 2e9;
    }
    if (usable_cores() < 2) return costs;
    Responder responder(Waiting::SPINNING);
    costs.wait_s = least([&] { return responder.round(); }) / 2e9;
    responder.writes.store(true);
    std::vector<float> sum(COUNT);
    const double read_ns = least([&]() -> std::int64_t {
        if (responder.round() < 0) return -1;
        const std::int64_t began = now_ns();
        claim(reinterpret_cast<char*>(responder.written()), COUNT * sizeof(float));
        combine(Dtype::float32, Op::sum, sum.data(), responder.written(), COUNT);
        return now_ns() - began;
    });
    costs.byte_s = read_ns / 1e9 / (COUNT * sizeof(float));
    return costs;
}

}  // namespace potluck::shm
