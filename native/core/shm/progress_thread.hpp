// The progress thread: makes progress on the calls that no caller waits for, over all channels of a
// group. (Calls that a thread waits for are moved by that thread; see queue.hpp.)
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/shm/queue.hpp"

namespace potluck::shm {

class ProgressThread {
public:
    ProgressThread() = default;
    ~ProgressThread() { close(); }
    ProgressThread(const ProgressThread&) = delete;
    ProgressThread& operator=(const ProgressThread&) = delete;

    // Serve `queue` from now on. The thread starts with the first queue.
    void serve(std::shared_ptr<Queue> queue);
    // Serve `queue`, which has no calls, no longer.
    void forget(const std::shared_ptr<Queue>& queue);
    // A queue may have work. From any thread.
    void wake();
    // End the thread, and keep no queue.
    void close();

private:
    void run();

    std::mutex lock_;
    std::vector<std::shared_ptr<Queue>> queues_;
    std::thread thread_;
    Word doorbell_{0};
    std::atomic<bool> is_asleep_{false};
    std::atomic<bool> is_closed_{false};
};

}  // namespace potluck::shm
