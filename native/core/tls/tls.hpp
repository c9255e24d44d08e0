// TLS 1.3 with mutual certificates over a non-blocking socket, through OpenSSL: what Python's ssl
// does for transport/tcp.py, without its 16 KiB a call and without the interpreter lock.
//
// A connection has two phases. Python drives the handshake and the greeting (tls.cpp); then the
// progress loop takes the connection over (tls_stream.cpp). OpenSSL makes the records in both. The
// BIO under OpenSSL is potluck's own: it collects records, so that one system call carries two.
#pragma once

#ifdef POTLUCK_OPENSSL

#include <openssl/ssl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/tls/stream.hpp"

namespace potluck {

constexpr size_t record_bytes = 16 * 1024;  // of plaintext, at most (RFC 8446, section 5.1)
// What encryption adds to a record: its header, the content type behind the bytes, the tag.
constexpr size_t record_overhead = 5 + 1 + 16;
// Records that collect before a system call, and that one recv() may bring. Two records stay in the
// caches next to the plaintext; eight cost 20 to 40% more CPU per GB over the loopback, one costs a
// system call for each 16 KiB (docs/performance.md).
//
// Read into a buffer that holds exactly two: OpenSSL begins it 3 bytes in, so that payloads are
// aligned, and asks for the rest of a record alone if the buffer's end cuts that record.
constexpr size_t read_batch_bytes = 2 * (record_bytes + record_overhead) + 3;
// Written with room for a frame's header, which is a record of its own, beside them.
constexpr size_t write_batch_bytes = 2 * (record_bytes + record_overhead) + 128;

// What one end shows and trusts. Shared from itself: see Ticket.
class TlsContext : public std::enable_shared_from_this<TlsContext> {
public:
    // `ca`: the certificates that peers may be signed by; `chain`: this node's certificate and key
    // (both PEM). std::runtime_error if OpenSSL does not take them. `records_per_key`: when a link
    // changes the key it sends with.
    TlsContext(const std::string& ca, const std::string& chain, bool is_server,
               uint64_t records_per_key);
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

    SSL_CTX* get() const { return context_; }
    bool is_server() const { return is_server_; }
    uint64_t records_per_key() const { return records_per_key_; }

private:
    SSL_CTX* context_;
    bool is_server_;
    uint64_t records_per_key_;
};

// How a step of the greeting ended, for transport/native_tls.py to say in its own errors.
enum class TlsStatus {
    done,
    wants_read,
    wants_write,
    ended,        // the peer closed the connection
    failed,       // the system said no: `error` is errno
    refused,      // OpenSSL said no: `reason` is its name for why
    distrusted,   // the peer's certificate was not accepted: `reason` is why
};

class TlsStream : public Stream {
public:
    // Over a connected non-blocking socket that the caller keeps open.
    TlsStream(std::shared_ptr<TlsContext> context, int fd, std::string peer);
    ~TlsStream() override;

    // -- the greeting, driven from Python

    TlsStatus handshake();
    // Read up to `count` bytes; `done` with 0 bytes never happens.
    TlsStatus read_some(uint8_t* buffer, size_t count, size_t& taken);
    // Write all, or `wants_write` until the same call comes again and finds nothing left to hand on.
    TlsStatus write_all(const uint8_t* data, size_t count);
    // The peer's certificate (DER), empty before the handshake.
    std::string peer_certificate() const;
    // Decrypted bytes that wait.
    size_t pending() const;

    // Keys that the link has sent with.
    uint64_t num_keys() const { return num_keys_.load(std::memory_order_relaxed); }

    // Memory for records on their way to the kernel.
    size_t buffer_bytes() const { return out_.capacity(); }

    int error() const { return error_; }
    const std::string& reason() const { return reason_; }

    // -- Stream

    // It reads ahead from now on.
    void take_over(std::string peer) override;
    int fd() const override { return fd_; }
    size_t send(const uint8_t* data, size_t count) override;
    void flush() override;
    size_t unsent() const override { return out_.size() - out_at_; }
    size_t recv(uint8_t* buffer, size_t count) override;
    bool is_readable() const override;

private:
    friend struct SocketBio;

    TlsStatus judge(int result);
    TlsStatus push();
    std::string ending(TlsStatus status, const char* doing) const;
    void check_sending() const;

    std::shared_ptr<TlsContext> context_;
    int fd_;
    std::string peer_;
    SSL* ssl_;
    std::atomic<uint64_t> num_keys_{1};
    uint64_t num_records_ = 0;    // sent with the present key since the loop has the connection
    bool is_owing_ = false;       // `write_all` has encrypted its bytes, and not all have left
    bool is_at_end_ = false;      // the peer has closed its side
    bool is_drained_ = false;     // the last recv() emptied the kernel's buffer
    bool is_starved_ = false;     // OpenSSL needs more bytes for its next record
    int num_handshakes_ = 0;      // handshake messages since the last data,
    size_t num_quiet_ = 0;        // and bytes received
    int error_ = 0;
    std::string reason_;
    std::string end_;             // why no more will be received,
    std::string send_end_;        // and why no more can be sent
    std::vector<uint8_t> out_;    // records on their way to the kernel,
    size_t out_at_ = 0;           // from here on
};

}  // namespace potluck

#endif
