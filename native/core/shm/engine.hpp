// The thread that moves what callers do not wait for, over all channels of a group.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/shm/queue.hpp"

namespace potluck::shm {

class Engine {
public:
    Engine() = default;
    ~Engine() { close(); }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // `queue` has calls; the thread starts with the first.
    void serve(std::shared_ptr<Queue> queue);
    // There may be something to do.
    void ring();
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
