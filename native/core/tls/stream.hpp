// A connection that the loop moves bytes over: non-blocking, in order, authenticated when it was
// made. Implementations: tls.hpp (TLS 1.3), local.hpp (threads of one process); tests and benchmarks
// have their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace potluck {

// The link ended; the text says who and how.
struct LinkError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Shared from itself: see Ticket.
class Stream : public std::enable_shared_from_this<Stream> {
public:
    virtual ~Stream() = default;

    // From now on the loop has it. `peer` names the other end in errors.
    virtual void take_over(std::string peer) = 0;

    // The descriptor to wait on. Whoever made the stream owns it.
    virtual int fd() const = 0;

    // Take some bytes; 0 means: full now. What was taken may still wait in `unsent`.
    virtual size_t send(const uint8_t* data, size_t count) = 0;

    // Hand what waits to the kernel, as far as it takes it.
    virtual void flush() = 0;

    // Bytes that were taken and not handed to the kernel yet.
    virtual size_t unsent() const = 0;

    // Fill as much of the buffer as has come; 0 means: none now. LinkError at the end, after the
    // bytes that came before it.
    virtual size_t recv(uint8_t* buffer, size_t count) = 0;

    // Whether there are bytes that the descriptor does not show.
    virtual bool is_readable() const = 0;
};

}  // namespace potluck
