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
// An answer that takes longer says how busy the machine is, not how fast.
constexpr std::int64_t PATIENCE_NS = 200'000;
constexpr std::size_t COUNT = 8192;

// How those who wait for each other pass the time.
enum class Waiting { SPINNING, YIELDING, SLEEPING };

void pass(Waiting how, Word& word, std::uint32_t seen) {
    switch (how) {
        case Waiting::SPINNING:
            return relax();
        case Waiting::YIELDING:
            return yield();
        case Waiting::SLEEPING:
            return sleep_on({&word, seen}, PATIENCE_NS);
    }
}

// A thread that answers each number with the same number, after it has written what is to be read.
class Partner {
public:
    explicit Partner(Waiting how) : how_(how), written_(COUNT), thread_([this] { answer(); }) {}
    ~Partner() {
        is_over_.store(true);
        ask();
        thread_.join();
    }
    Partner(const Partner&) = delete;
    Partner& operator=(const Partner&) = delete;

    // Nanoseconds until the answer; -1 if it did not come in time.
    std::int64_t round() {
        const std::int64_t began = now_ns();
        const std::uint32_t number = ask();
        std::int64_t now = began;
        while (answered_.load(std::memory_order_acquire) != number) {
            now = now_ns();
            if (now - began > PATIENCE_NS) return -1;
            pass(how_, answered_, number - 1);
        }
        return now_ns() - began;
    }
    // What it writes for each number from now on, in whole cache lines.
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
                pass(how_, asked_, seen);
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

// Keeps this thread, and those it starts, on the core that it is on.
class OneCore {
public:
#if defined(__linux__)
    OneCore() {
        cpu_set_t one;
        CPU_ZERO(&one);
        const int core = sched_getcpu();
        if (core < 0 || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
        CPU_SET(static_cast<std::size_t>(core), &one);
        is_kept = sched_setaffinity(0, sizeof one, &one) == 0;
    }
    ~OneCore() {
        if (is_kept) sched_setaffinity(0, sizeof before_, &before_);
    }
#endif
    bool is_kept = false;

private:
#if defined(__linux__)
    cpu_set_t before_;
#endif
};

// The least of what `once` gives again and again (others that use the machine only add to it), 0 if
// that is always negative.
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
        Partner partner(Waiting::SLEEPING);
        costs.wake_s = least([&] { return partner.round(); }) / 2e9;
    }
    {
        const OneCore here;
        Partner partner(Waiting::YIELDING);
        if (here.is_kept) costs.turn_s = least([&] { return partner.round(); }) / 2e9;
    }
    if (usable_cores() < 2) return costs;
    Partner partner(Waiting::SPINNING);
    costs.wait_s = least([&] { return partner.round(); }) / 2e9;
    partner.writes.store(true);
    std::vector<float> sum(COUNT);
    const double read_ns = least([&]() -> std::int64_t {
        if (partner.round() < 0) return -1;
        const std::int64_t began = now_ns();
        claim(reinterpret_cast<char*>(partner.written()), COUNT * sizeof(float));
        combine(Dtype::float32, Op::sum, sum.data(), partner.written(), COUNT);
        return now_ns() - began;
    });
    costs.byte_s = read_ns / 1e9 / (COUNT * sizeof(float));
    return costs;
}

}  // namespace potluck::shm
