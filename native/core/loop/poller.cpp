#include "core/loop/poller.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <system_error>

#ifdef __linux__
#include <sys/epoll.h>
#include <sys/eventfd.h>
#endif

namespace potluck {

namespace {

[[noreturn]] void fail(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

// Rounded up: with 0 for a deadline that is a fraction of a millisecond away, the loop would spin
// until then.
int milliseconds(double seconds) {
    return static_cast<int>(std::ceil(std::clamp(seconds, 0.0, 3600.0) * 1000));
}

void drain(int fd) {
    uint8_t bytes[64];
    while (::read(fd, bytes, sizeof bytes) > 0) {
    }
}

}  // namespace

void Poller::wake() {
#ifdef __linux__
    const uint64_t one = 1;
#else
    const uint8_t one = 1;
#endif
    // EAGAIN means that the pipe is full, so `wait` will return anyway.
    while (::write(wake_writer_, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

#ifdef __linux__

Poller::Poller() {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ < 0) fail("epoll_create1");
    wake_reader_ = wake_writer_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_reader_ < 0) {
        ::close(epoll_);
        fail("eventfd");
    }
    watch(wake_reader_, -1, false, true);
}

void Poller::close() {
    if (epoll_ < 0) return;
    ::close(wake_reader_);
    ::close(epoll_);
    epoll_ = -1;
}

void Poller::watch(int fd, int tag, bool for_writing, bool is_new) {
    epoll_event event{};
    event.events = EPOLLIN | (for_writing ? EPOLLOUT : 0u);
    const uint64_t high = static_cast<uint32_t>(tag);
    event.data.u64 = static_cast<uint32_t>(fd) | high << 32;
    if (::epoll_ctl(epoll_, is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) < 0) {
        fail("epoll_ctl");
    }
}

void Poller::forget(int fd) { ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

const std::vector<Poller::Ready>& Poller::wait(double seconds) {
    epoll_event events[64];
    ready_.clear();
    const int count = ::epoll_wait(epoll_, events, 64, milliseconds(seconds));
    for (int index = 0; index < count; ++index) {
        const int tag = static_cast<int32_t>(events[index].data.u64 >> 32);
        if (tag < 0) {
            drain(wake_reader_);
        } else {
            const uint32_t what = events[index].events;
            ready_.push_back({tag, (what & ~uint32_t{EPOLLOUT}) != 0, (what & EPOLLOUT) != 0});
        }
    }
    return ready_;
}

#else

Poller::Poller() {
    int ends[2];
    if (::pipe(ends) < 0) fail("pipe");
    for (int end : ends) {
        ::fcntl(end, F_SETFL, O_NONBLOCK);
        ::fcntl(end, F_SETFD, FD_CLOEXEC);
    }
    wake_reader_ = ends[0];
    wake_writer_ = ends[1];
    watch(wake_reader_, -1, false, true);
}

void Poller::close() {
    if (wake_reader_ < 0) return;
    ::close(wake_reader_);
    ::close(wake_writer_);
    wake_reader_ = -1;
}

void Poller::watch(int fd, int tag, bool for_writing, bool) { watched_[fd] = {tag, for_writing}; }

void Poller::forget(int fd) { watched_.erase(fd); }

const std::vector<Poller::Ready>& Poller::wait(double seconds) {
    std::vector<pollfd> polled;
    std::vector<int> tags;
    for (const auto& [fd, each] : watched_) {
        polled.push_back({fd, static_cast<short>(POLLIN | (each.for_writing ? POLLOUT : 0)), 0});
        tags.push_back(each.tag);
    }
    ready_.clear();
    if (::poll(polled.data(), static_cast<nfds_t>(polled.size()), milliseconds(seconds)) <= 0) {
        return ready_;
    }
    for (size_t index = 0; index < polled.size(); ++index) {
        if (polled[index].revents == 0) continue;
        if (tags[index] < 0) {
            drain(wake_reader_);
        } else {
            const int what = polled[index].revents;
            ready_.push_back({tags[index], (what & ~POLLOUT) != 0, (what & POLLOUT) != 0});
        }
    }
    return ready_;
}

#endif

}  // namespace potluck
