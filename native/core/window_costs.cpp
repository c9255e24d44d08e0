#include "core/window_costs.hpp"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/reduce.hpp"
#include "core/window_wait.hpp"

namespace potluck::window {

namespace {

constexpr std::int64_t PHASE_NS = 600'000;
// An answer that takes longer says how busy the machine is, not how fast.
constexpr std::int64_t PATIENCE_NS = 200'000;
constexpr std::size_t COUNT = 8192;

// A thread that answers each number with the same number, after it has written what is to be read.
class Partner {
public:
    Partner() : written_(COUNT), thread_([this] { answer(); }) {}
    ~Partner() {
        is_over_.store(true);
        ask(true);
        thread_.join();
    }
    Partner(const Partner&) = delete;
    Partner& operator=(const Partner&) = delete;

    // Nanoseconds until the answer; -1 if it did not come in time.
    std::int64_t round(bool sleeps) {
        const std::int64_t began = now_ns();
        ask(sleeps);
        std::int64_t now = began;
        while (answered_.load(std::memory_order_acquire) != asked_.load()) {
            now = now_ns();
            if (now - began > PATIENCE_NS) return -1;
            if (sleeps) sleep_on({&answered_, asked_.load() - 1}, PATIENCE_NS);
            else relax();
        }
        return now_ns() - began;
    }
    bool is_idle() const { return answered_.load(std::memory_order_acquire) == asked_.load(); }
    const float* written() const { return written_.data(); }

    std::atomic<bool> writes{false};

private:
    void ask(bool sleeps) {
        sleeps_.store(sleeps);
        asked_.fetch_add(1);
        wake_all(asked_);
    }
    void answer() {
        std::uint32_t seen = 0;
        while (!is_over_.load()) {
            if (asked_.load(std::memory_order_acquire) == seen) {
                if (sleeps_.load()) sleep_on({&asked_, seen}, PATIENCE_NS);
                else relax();
                continue;
            }
            seen = asked_.load();
            if (writes.load()) std::fill(written_.begin(), written_.end(), 1.0f);
            answered_.store(seen, std::memory_order_release);
            if (sleeps_.load()) wake_all(answered_);
        }
    }

    alignas(64) Word asked_{0};
    alignas(64) Word answered_{0};
    alignas(64) std::atomic<bool> sleeps_{true};
    std::atomic<bool> is_over_{false};
    std::vector<float> written_;
    std::thread thread_;
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
    Partner partner;
    std::vector<float> sum(COUNT);
    costs.switch_s = least([&] { return partner.round(true); }) / 2e9;
    partner.writes.store(true);
    const double read_ns = least([&]() -> std::int64_t {
        if (partner.round(true) < 0 || !partner.is_idle()) return -1;
        const std::int64_t began = now_ns();
        combine(Dtype::float32, Op::sum, sum.data(), partner.written(), COUNT);
        return now_ns() - began;
    });
    costs.byte_s = read_ns / 1e9 / (COUNT * sizeof(float));
    partner.writes.store(false);
    if (usable_cores() > 1) costs.wait_s = least([&] { return partner.round(false); }) / 2e9;
    return costs;
}

}  // namespace potluck::window
