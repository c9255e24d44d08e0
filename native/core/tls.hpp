// TLS 1.3 with mutual certificates over a non-blocking socket, through OpenSSL: what Python's ssl
// does for transport/tcp.py, without its 16 KiB a call and without the interpreter lock.
//
// OpenSSL reads and writes memory here, not the socket, so that one system call moves many records.
// While a greeting is read nothing is read ahead: what follows it belongs to the link.
#pragma once

#ifdef POTLUCK_OPENSSL

#include <openssl/ssl.h>

#include <memory>
#include <string>
#include <vector>

#include "core/stream.hpp"

namespace potluck {

// What one end shows and trusts.
class TlsContext {
public:
    // `ca`: the certificates that peers may be signed by; `chain`: this node's certificate and key
    // (both PEM). std::runtime_error if OpenSSL does not take them.
    TlsContext(const std::string& ca, const std::string& chain, bool is_server);
    ~TlsContext();
    TlsContext(const TlsContext&) = delete;
    TlsContext& operator=(const TlsContext&) = delete;

    SSL_CTX* get() const { return context_; }
    bool is_server() const { return is_server_; }

private:
    SSL_CTX* context_;
    bool is_server_;
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
    size_t unsent() const override { return out_.size() - out_at_; }
    size_t recv(uint8_t* buffer, size_t count) override;
    bool is_readable() const override;

private:
    friend struct TlsMemory;

    TlsStatus judge(int result);
    TlsStatus push();
    [[noreturn]] void end(TlsStatus status, const char* doing);

    std::shared_ptr<TlsContext> context_;
    int fd_;
    std::string peer_;
    SSL* ssl_;
    bool reads_ahead_ = false;
    bool is_owing_ = false;
    bool is_at_end_ = false;
    int error_ = 0;
    std::string reason_;
    std::string end_;
    std::vector<uint8_t> in_;
    size_t in_at_ = 0;
    size_t in_end_ = 0;
    std::vector<uint8_t> out_;
    size_t out_at_ = 0;
};

}  // namespace potluck

#endif
