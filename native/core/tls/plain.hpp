// Clear text over a connection whose greeting went under TLS: the `plain` mode, for a cable between
// two machines that trust each other. Every frame carries checksums (core/loop/connection.hpp),
// against accidents; against anybody on the wire there is nothing.
//
// Nothing is kept here: what `send` takes the kernel has, and what came is read straight to its place.
#pragma once

#include <string>
#include <utility>

#include "core/tls/stream.hpp"

namespace potluck {

class PlainStream : public Stream {
public:
    // Over a connected non-blocking socket that the caller keeps open.
    explicit PlainStream(int fd) : fd_(fd) {}

    void take_over(std::string peer) override { peer_ = std::move(peer); }
    int fd() const override { return fd_; }
    size_t send(const uint8_t* data, size_t count) override;
    size_t send(const Piece* pieces, size_t num) override;
    void flush() override {}
    size_t unsent() const override { return 0; }
    size_t recv(uint8_t* buffer, size_t count) override;
    bool is_readable() const override { return !end_.empty(); }
    bool needs_checksums() const override { return true; }

private:
    [[noreturn]] void end(std::string& why, int error, const char* doing);

    int fd_;
    std::string peer_;
    std::string end_;       // why no more will be received,
    std::string send_end_;  // and why no more can be sent
};

}  // namespace potluck
