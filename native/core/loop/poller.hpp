// A poller for many descriptors, level-triggered: epoll on Linux, poll elsewhere.
#pragma once

#include <vector>

#ifndef __linux__
#include <map>
#endif

namespace potluck {

class Poller {
public:
    Poller();
    ~Poller() { close(); }
    Poller(const Poller&) = delete;
    Poller& operator=(const Poller&) = delete;

    // Watch `fd` for reading, and if `for_writing` also for writing. `tag` (not negative) names it
    // in the results of `wait`.
    void watch(int fd, int tag, bool for_writing, bool is_new);
    void forget(int fd);

    // A descriptor that is ready. Hang-ups and errors count as readable: the next read reports
    // them.
    struct Ready {
        int tag;
        bool is_readable;
        bool is_writable;
    };

    // The descriptors that are ready, after at most `seconds`.
    const std::vector<Ready>& wait(double seconds);

    // From any thread: make `wait` return, now or at its next call.
    void wake();

    // Release the descriptors of the poller. No other call may follow. Idempotent.
    void close();

private:
    std::vector<Ready> ready_;
    int wake_reader_ = -1;
    int wake_writer_ = -1;
#ifdef __linux__
    int epoll_ = -1;
#else
    struct Watched {
        int tag;
        bool for_writing;
    };
    std::map<int, Watched> watched_;
#endif
};

}  // namespace potluck
