#include "core/tls.hpp"

#ifdef POTLUCK_OPENSSL

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <sys/socket.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

namespace potluck {

namespace {

constexpr size_t record_bytes = 16 * 1024;
// What waits for the kernel, and what one call asks it for.
constexpr size_t out_bytes = 256 * 1024;
constexpr size_t in_bytes = 256 * 1024;

#ifdef MSG_NOSIGNAL
constexpr int send_flags = MSG_NOSIGNAL;
#else
constexpr int send_flags = 0;
#endif

std::string reason_of(unsigned long code) {
    const char* text = ERR_reason_error_string(code);
    std::string name = text ? text : "unknown";
    for (char& letter : name) {
        letter = letter == ' ' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
    }
    return name;
}

struct FreeBio {
    void operator()(BIO* bio) const { BIO_free(bio); }
};
using BioPtr = std::unique_ptr<BIO, FreeBio>;

struct FreeX509 {
    void operator()(X509* certificate) const { X509_free(certificate); }
};
using X509Ptr = std::unique_ptr<X509, FreeX509>;

BioPtr bytes_of(const std::string& pem) {
    return BioPtr(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Trust every certificate in `pem`; false if there is none, or one is damaged.
bool trust(X509_STORE* store, const std::string& pem) {
    const BioPtr source = bytes_of(pem);
    int count = 0;
    while (const X509Ptr authority{PEM_read_bio_X509(source.get(), nullptr, nullptr, nullptr)}) {
        if (X509_STORE_add_cert(store, authority.get()) != 1) return false;
        ++count;
    }
    const unsigned long last = ERR_peek_last_error();
    if (count == 0 || ERR_GET_REASON(last) != PEM_R_NO_START_LINE) return false;
    ERR_clear_error();
    return true;
}

}  // namespace

// -- the context

TlsContext::TlsContext(const std::string& ca, const std::string& chain, bool is_server)
    : context_(SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method())),
      is_server_(is_server) {
    ERR_clear_error();
    bool is_made = context_ != nullptr &&
                   SSL_CTX_set_min_proto_version(context_, TLS1_3_VERSION) == 1 &&
                   SSL_CTX_set_max_proto_version(context_, TLS1_3_VERSION) == 1;
    if (is_made) {
        // No resumption: every connection proves its key anew, and no ticket waits to be read.
        SSL_CTX_set_options(context_, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
        SSL_CTX_set_num_tickets(context_, 0);
        SSL_CTX_set_session_cache_mode(context_, SSL_SESS_CACHE_OFF);
        SSL_CTX_set_mode(context_, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_AUTO_RETRY);
        SSL_CTX_set_verify(context_, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
        is_made = trust(SSL_CTX_get_cert_store(context_), ca);
    }
    if (is_made) {
        const BioPtr mine = bytes_of(chain);
        const X509Ptr certificate(PEM_read_bio_X509(mine.get(), nullptr, nullptr, nullptr));
        const BioPtr again = bytes_of(chain);
        EVP_PKEY* key = PEM_read_bio_PrivateKey(again.get(), nullptr, nullptr, nullptr);
        is_made = certificate && key != nullptr &&
                  SSL_CTX_use_certificate(context_, certificate.get()) == 1 &&
                  SSL_CTX_use_PrivateKey(context_, key) == 1 &&
                  SSL_CTX_check_private_key(context_) == 1;
        EVP_PKEY_free(key);
    }
    if (!is_made) {
        const std::string why = reason_of(ERR_get_error());
        SSL_CTX_free(context_);
        throw std::runtime_error("OpenSSL does not take these credentials: " + why);
    }
}

TlsContext::~TlsContext() { SSL_CTX_free(context_); }

// -- OpenSSL's view of the socket

struct TlsMemory {
    static int read(BIO* bio, char* buffer, int count) {
        auto& stream = *static_cast<TlsStream*>(BIO_get_data(bio));
        BIO_clear_retry_flags(bio);
        if (count <= 0) return 0;
        auto wanted = static_cast<size_t>(count);
        if (stream.in_at_ < stream.in_end_) {
            wanted = std::min(wanted, stream.in_end_ - stream.in_at_);
            std::memcpy(buffer, stream.in_.data() + stream.in_at_, wanted);
            stream.in_at_ += wanted;
            return static_cast<int>(wanted);
        }
        if (!stream.reads_ahead_) return receive(bio, stream, buffer, wanted);
        const int came = receive(bio, stream, stream.in_.data(), stream.in_.size());
        if (came <= 0) return came;
        wanted = std::min(wanted, static_cast<size_t>(came));
        std::memcpy(buffer, stream.in_.data(), wanted);
        stream.in_at_ = wanted;
        stream.in_end_ = static_cast<size_t>(came);
        return static_cast<int>(wanted);
    }

    static int write(BIO* bio, const char* data, int count) {
        auto& stream = *static_cast<TlsStream*>(BIO_get_data(bio));
        BIO_clear_retry_flags(bio);
        stream.out_.insert(stream.out_.end(), data, data + count);
        return count;
    }

    static long control(BIO* bio, int command, long, void*) {
        switch (command) {
            case BIO_CTRL_FLUSH: return 1;
            case BIO_CTRL_EOF: return static_cast<TlsStream*>(BIO_get_data(bio))->is_at_end_;
            default: return 0;
        }
    }

    static BIO_METHOD* method() {
        static BIO_METHOD* const made = [] {
            BIO_METHOD* method =
                BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "potluck socket");
            BIO_meth_set_read(method, read);
            BIO_meth_set_write(method, write);
            BIO_meth_set_ctrl(method, control);
            return method;
        }();
        return made;
    }

private:
    static int receive(BIO* bio, TlsStream& stream, void* buffer, size_t count) {
        while (true) {
            const ssize_t came = ::recv(stream.fd_, buffer, count, 0);
            if (came > 0) return static_cast<int>(came);
            if (came == 0) {
                stream.is_at_end_ = true;
                return 0;
            }
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                BIO_set_retry_read(bio);
            } else {
                stream.error_ = errno;
            }
            return -1;
        }
    }
};

// -- one connection

TlsStream::TlsStream(std::shared_ptr<TlsContext> context, int fd, std::string peer)
    : context_(std::move(context)), fd_(fd), peer_(std::move(peer)), ssl_(SSL_new(context_->get())) {
    BIO* bio = BIO_new(TlsMemory::method());
    if (ssl_ == nullptr || bio == nullptr) {
        SSL_free(ssl_);
        BIO_free(bio);
        throw std::bad_alloc();
    }
    BIO_set_data(bio, this);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl_, bio, bio);
    if (context_->is_server()) {
        SSL_set_accept_state(ssl_);
    } else {
        SSL_set_connect_state(ssl_);
    }
}

TlsStream::~TlsStream() { SSL_free(ssl_); }

TlsStatus TlsStream::handshake() {
    ERR_clear_error();
    const int result = SSL_do_handshake(ssl_);
    const TlsStatus status = judge(result);
    const TlsStatus pushed = push();  // an alert too must leave, whatever became of the handshake
    return status == TlsStatus::done ? pushed : status;
}

TlsStatus TlsStream::read_some(uint8_t* buffer, size_t count, size_t& taken) {
    taken = 0;
    ERR_clear_error();
    const TlsStatus status = judge(SSL_read_ex(ssl_, buffer, count, &taken));
    push();
    return status;
}

TlsStatus TlsStream::write_all(const uint8_t* data, size_t count) {
    if (!is_owing_) {
        ERR_clear_error();
        size_t taken = 0;
        const TlsStatus status = judge(SSL_write_ex(ssl_, data, count, &taken));
        if (status != TlsStatus::done) return status;
        is_owing_ = true;
    }
    const TlsStatus status = push();
    is_owing_ = status == TlsStatus::wants_write;
    return status;
}

std::string TlsStream::peer_certificate() const {
    const X509Ptr certificate(SSL_get1_peer_certificate(ssl_));
    if (!certificate) return {};
    unsigned char* der = nullptr;
    const int length = i2d_X509(certificate.get(), &der);
    if (length <= 0) return {};
    std::string bytes(reinterpret_cast<char*>(der), static_cast<size_t>(length));
    OPENSSL_free(der);
    return bytes;
}

size_t TlsStream::pending() const { return static_cast<size_t>(SSL_pending(ssl_)); }

bool TlsStream::is_clean() const {
    return in_at_ == in_end_ && SSL_has_pending(ssl_) == 0 && unsent() == 0 && !is_owing_;
}

void TlsStream::take_over(std::string peer) {
    peer_ = std::move(peer);
    reads_ahead_ = true;
    in_.resize(in_bytes);
    out_.reserve(out_bytes + 2 * record_bytes);
}

// What became of a call on `ssl_` that returned `result`.
TlsStatus TlsStream::judge(int result) {
    if (result == 1) return TlsStatus::done;
    const int code = SSL_get_error(ssl_, result);
    switch (code) {
        case SSL_ERROR_WANT_READ: return TlsStatus::wants_read;
        case SSL_ERROR_WANT_WRITE: return TlsStatus::wants_write;
        case SSL_ERROR_ZERO_RETURN: return TlsStatus::ended;
        default: break;
    }
    if (error_ != 0) return TlsStatus::failed;
    const unsigned long what = ERR_get_error();
    if (code == SSL_ERROR_SSL && !is_at_end_) {
        if (ERR_GET_LIB(what) == ERR_LIB_SSL &&
            ERR_GET_REASON(what) == SSL_R_CERTIFICATE_VERIFY_FAILED) {
            reason_ = X509_verify_cert_error_string(SSL_get_verify_result(ssl_));
            return TlsStatus::distrusted;
        }
        reason_ = reason_of(what);
        return TlsStatus::refused;
    }
    return TlsStatus::ended;
}

// Hand what OpenSSL wrote to the kernel.
TlsStatus TlsStream::push() {
    while (out_at_ < out_.size()) {
        const ssize_t left =
            ::send(fd_, out_.data() + out_at_, out_.size() - out_at_, send_flags);
        if (left >= 0) {
            out_at_ += static_cast<size_t>(left);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return TlsStatus::wants_write;
        } else if (errno != EINTR) {
            error_ = errno;
            return TlsStatus::failed;
        }
    }
    out_.clear();
    out_at_ = 0;
    return TlsStatus::done;
}

void TlsStream::end(TlsStatus status, const char* doing) {
    if (status == TlsStatus::ended) {
        end_ = peer_ + " closed the connection while " + doing;
    } else if (status == TlsStatus::failed) {
        end_ = "connection to " + peer_ + " failed while " + doing + ": " + std::strerror(error_);
    } else {
        end_ = "link to " + peer_ + " broke while " + doing + ": " + reason_;
    }
    throw LinkError(end_);
}

size_t TlsStream::send(const uint8_t* data, size_t count) {
    if (!end_.empty()) throw LinkError(end_);
    size_t total = 0;
    while (total < count) {
        if (unsent() >= out_bytes) {
            flush();
            if (unsent() >= out_bytes) break;
        }
        size_t taken = 0;
        ERR_clear_error();
        const size_t size = std::min(count - total, record_bytes);
        const TlsStatus status = judge(SSL_write_ex(ssl_, data + total, size, &taken));
        if (status == TlsStatus::wants_read || status == TlsStatus::wants_write) break;
        if (status != TlsStatus::done) end(status, "sending");
        total += taken;
    }
    return total;
}

void TlsStream::flush() {
    if (!end_.empty()) throw LinkError(end_);
    if (push() == TlsStatus::failed) end(TlsStatus::failed, "sending");
    if (out_at_ > out_bytes / 2) {
        out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(out_at_));
        out_at_ = 0;
    }
}

size_t TlsStream::recv(uint8_t* buffer, size_t count) {
    if (!end_.empty()) throw LinkError(end_);
    size_t total = 0;
    while (total < count) {
        size_t taken = 0;
        ERR_clear_error();
        const TlsStatus status = judge(SSL_read_ex(ssl_, buffer + total, count - total, &taken));
        if (status == TlsStatus::wants_read || status == TlsStatus::wants_write) break;
        if (status != TlsStatus::done) {
            try {
                end(status, "receiving");
            } catch (const LinkError&) {
                if (total == 0) throw;
                break;
            }
        }
        total += taken;
    }
    return total;
}

bool TlsStream::is_readable() const {
    return !end_.empty() || in_at_ < in_end_ || SSL_pending(ssl_) > 0;
}

}  // namespace potluck

#endif
