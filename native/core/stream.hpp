// A connection that the loop moves bytes over: non-blocking, in order, authenticated when it was
// made. Implementations: tls.hpp (TLS 1.3), plain.hpp (clear text, after a greeting under TLS).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace potluck {

// The link ended; the text says who and how.
struct LinkError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Stream {
public:
    virtual ~Stream() = default;

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

    // Whether every frame carries a checksum (where TLS does not guard the bytes).
    virtual bool needs_checksums() const { return false; }
};

}  // namespace potluck
