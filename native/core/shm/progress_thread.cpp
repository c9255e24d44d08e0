#include "core/shm/progress_thread.hpp"

#include <algorithm>

namespace potluck::shm {

namespace {

constexpr std::int64_t MAX_SLEEP_NS = 50'000'000;
// The progress thread hardly spins: callers compute meanwhile, and need the core.
constexpr std::int64_t SPIN_NS = 2'000;

}  // namespace

void ProgressThread::serve(std::shared_ptr<Queue> queue) {
    const std::lock_guard hold(lock_);
    if (is_closed_) return;
    queues_.push_back(std::move(queue));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void ProgressThread::forget(const std::shared_ptr<Queue>& queue) {
    {
        const std::lock_guard hold(lock_);
        std::erase(queues_, queue);
    }
    wake();  // it keeps the queues of its last turn while it sleeps
}

void ProgressThread::wake() {
    doorbell_.fetch_add(1, std::memory_order_seq_cst);
    if (is_asleep_.load(std::memory_order_seq_cst)) wake_all(doorbell_);
}

void ProgressThread::close() {
    {
        const std::lock_guard hold(lock_);
        is_closed_ = true;
    }
    wake();
    if (thread_.joinable()) thread_.join();
    std::vector<std::shared_ptr<Queue>> queues;  // destroyed without the lock
    const std::lock_guard hold(lock_);
    queues.swap(queues_);
}

void ProgressThread::run() {
    std::vector<std::shared_ptr<Queue>> queues;
    std::vector<Watch> watches;
    std::int64_t idle_since = 0;
    while (true) {
        // Read before the queues: work that is announced from here on changes the doorbell, so that
        // the thread does not sleep over it.
        const std::uint32_t seen = doorbell_.load(std::memory_order_seq_cst);
        // A copy, so that no lock is held while a queue is polled: a queue takes its own lock.
        {
            const std::lock_guard hold(lock_);
            if (is_closed_) return;
            queues = queues_;
        }
        const std::int64_t now = now_ns();
        const bool may_sleep = idle_since != 0 && now - idle_since > SPIN_NS;
        std::int64_t until = now + MAX_SLEEP_NS;
        bool has_moved = false;
        watches.assign(1, {&doorbell_, seen});
        for (const auto& queue : queues) {
            Watch watch{};
            const Queue::Poll found = queue->poll(may_sleep ? &watch : nullptr, &until);
            if (found == Queue::Poll::MOVED) has_moved = true;
            if (found == Queue::Poll::BLOCKED) watches.push_back(watch);
        }
        if (has_moved) {
            idle_since = 0;
        } else if (!may_sleep) {
            if (idle_since == 0) idle_since = now;
            relax();
        } else {
            // Dekker's pattern, as in Channel::arrive: this thread stores the flag, then loads the
            // doorbell; `wake` changes the doorbell, then loads the flag. So either `wake` sees a
            // sleeper and makes the system call, or this load sees the new doorbell.
            is_asleep_.store(true, std::memory_order_seq_cst);
            if (doorbell_.load(std::memory_order_seq_cst) == seen) {
                sleep_on_any(watches.data(), static_cast<int>(watches.size()), until - now_ns());
            }
            is_asleep_.store(false, std::memory_order_seq_cst);
            idle_since = 0;
        }
    }
}

}  // namespace potluck::shm
