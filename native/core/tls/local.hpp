// A link between threads of one process: a pair of sockets, in clear text. For the in-process worlds
// of backends/inprocess.py. The twin of transport/inproc.py's InprocLink.
#pragma once

#ifdef POTLUCK_OPENSSL  // as the loop

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/tls/stream.hpp"

namespace potluck {

// Whether a worker was killed. All its links share it, so that they end at one moment: a loop that
// notices the end of one can't tell its peers of it through another. With the methods of
// threading.Event that InprocLink uses. Shared from itself: see Ticket.
class Killed : public std::enable_shared_from_this<Killed> {
public:
    void set() { is_set_.store(true); }
    bool is_set() const { return is_set_.load(); }

private:
    std::atomic<bool> is_set_{false};
};

class LocalStream : public Stream {
public:
    // Over one end of a pair of non-blocking sockets, which the caller keeps open.
    LocalStream(int fd, std::shared_ptr<const Killed> killed, std::string peer);

    void take_over(std::string peer) override { peer_ = std::move(peer); }
    int fd() const override { return fd_; }
    size_t send(const uint8_t* data, size_t count) override;
    void flush() override {}
    size_t unsent() const override { return 0; }
    size_t recv(uint8_t* buffer, size_t count) override;
    bool is_readable() const override { return !end_.empty(); }

private:
    void check() const;
    std::string ending(int error, const char* doing) const;

    int fd_;
    std::shared_ptr<const Killed> killed_;
    std::string peer_;
    std::string end_;       // why no more will be received,
    std::string send_end_;  // and why no more can be sent
};

}  // namespace potluck

#endif
