// Waiting for many descriptors: epoll on Linux, poll elsewhere.
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

    // Watch `fd` for bytes, and for room if `for_room`. `tag` is what `wait` gives for it.
    void watch(int fd, int tag, bool for_room, bool is_new);
    void forget(int fd);

    // A descriptor that is ready; its end and its failures count as bytes.
    struct Ready {
        int tag;
        bool has_bytes;
        bool has_room;
    };

    // What is ready, after at most so many seconds.
    const std::vector<Ready>& wait(double seconds);

    // From any thread: let `wait` return, with nothing for it.
    void wake();

    // Nothing is watched any more; no other call may follow. Idempotent.
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
        bool for_room;
    };
    std::map<int, Watched> watched_;
#endif
};

}  // namespace potluck
