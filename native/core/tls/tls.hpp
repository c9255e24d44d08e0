// TLS 1.3 with mutual certificates over a non-blocking socket, through OpenSSL: what Python's ssl
// does for transport/tcp.py, without its 16 KiB a call and without the interpreter lock.
//
// OpenSSL makes the handshake and carries the greeting. From then on the loop has the connection,
// and records are sealed and opened here (record.hpp), many of them per system call (tls_link.cpp).
// While a greeting is read nothing is read ahead: what follows it belongs to the link.
#pragma once

#ifdef POTLUCK_OPENSSL

#include <openssl/ssl.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/tls/record.hpp"
#include "core/tls/stream.hpp"

namespace potluck {

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

    int error() const { return error_; }
    const std::string& reason() const { return reason_; }

    // Whether the greeting left nothing behind: no byte read and not handed on, none to be written.
    // Only then can the connection go on in clear text.
    bool is_clean() const;

    // -- Stream

    // It reads ahead from now on.
    void take_over(std::string peer) override;
    int fd() const override { return fd_; }
    using Stream::send;
    size_t send(const uint8_t* data, size_t count) override;
    void flush() override;
    size_t unsent() const override { return out_end_ - out_at_; }
    size_t recv(uint8_t* buffer, size_t count) override;
    bool is_readable() const override;

private:
    friend struct TlsMemory;

    // What OpenSSL tells of one direction while it has the connection.
    struct Keys {
        std::vector<uint8_t> secret;
        uint64_t num_records = 0;  // since then
    };

    TlsStatus judge(int result);
    TlsStatus push();
    [[noreturn]] void end(TlsStatus status, const char* doing);
    void learn(const char* line);
    void seal(Content type, const uint8_t* data, size_t count);
    bool fill();
    bool open(uint8_t* buffer, size_t room, size_t& taken);
    void on_alert(const uint8_t* data, size_t count);
    void on_handshake(const uint8_t* data, size_t count);

    std::shared_ptr<TlsContext> context_;
    int fd_;
    std::string peer_;
    SSL* ssl_;
    Keys sends_, receives_;
    bool has_changed_keys_ = false;
    std::unique_ptr<RecordKey> sealing_, opening_;
    std::atomic<uint64_t> num_keys_{1};
    bool is_asked_for_key_ = false;
    bool is_owing_ = false;
    bool is_at_end_ = false;
    bool is_drained_ = false;  // the last call took all that had come
    int error_ = 0;
    std::string reason_;
    std::string end_;
    std::vector<uint8_t> in_;  // sealed
    size_t in_at_ = 0;
    size_t in_end_ = 0;
    std::vector<uint8_t> plain_;  // a record that was opened and not yet asked for
    size_t plain_at_ = 0;
    size_t plain_end_ = 0;
    std::vector<uint8_t> handshake_;  // a message of which more must come
    int num_idle_ = 0;                // records without bytes, one after the other
    std::vector<uint8_t> out_;
    size_t out_at_ = 0;
    size_t out_end_ = 0;
};

}  // namespace potluck

#endif
