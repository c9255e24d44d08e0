#include "core/tls/tls.hpp"

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
#include <utility>

namespace potluck {

namespace {

// The fastest first, where the processor has AES instructions; OpenSSL's order is 256 bits first.
constexpr char ciphers[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

// Handshake messages, and bytes received, that may follow each other without data between them. A
// handshake has fewer than ten messages, a link needs one now and then (a KeyUpdate). OpenSSL reads
// on until data comes, so a peer that sends nothing else (messages in records of one byte, say) would
// keep the loop busy and all other links waiting.
constexpr int max_handshakes = 32;
constexpr size_t max_quiet_bytes = 256 * 1024;
// More than any caller hands over at once.
constexpr size_t max_unsent = 256 * 1024;

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

// -- OpenSSL's view of the socket

struct SocketBio {
    static int read(BIO* bio, char* buffer, int count) {
        auto& stream = *static_cast<TlsStream*>(BIO_get_data(bio));
        BIO_clear_retry_flags(bio);
        if (count <= 0) return 0;
        if (stream.num_handshakes_ > max_handshakes || stream.num_quiet_ > max_quiet_bytes) {
            stream.reason_ = "TOO_MANY_HANDSHAKE_MESSAGES";
            return -1;
        }
        const auto room = static_cast<size_t>(count);
        // The last recv() got less than it asked for, so the kernel's buffer was empty: asking again
        // at once would cost a system call that says EAGAIN.
        if (std::exchange(stream.is_drained_, false)) {
            BIO_set_retry_read(bio);
            return -1;
        }
        while (true) {
            const ssize_t came = ::recv(stream.fd_, buffer, room, 0);
            if (came > 0) {
                stream.num_quiet_ += static_cast<size_t>(came);
                stream.is_drained_ = static_cast<size_t>(came) < room;
                return static_cast<int>(came);
            }
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

    // Takes every record: `send` asks for room before it encrypts. OpenSSL also answers a KeyUpdate
    // that asks for one, so a peer that asks and never reads must not fill this memory.
    static int write(BIO* bio, const char* data, int count) {
        auto& stream = *static_cast<TlsStream*>(BIO_get_data(bio));
        BIO_clear_retry_flags(bio);
        if (stream.unsent() > max_unsent) {
            stream.reason_ = "TOO_MANY_UNREAD_RECORDS";
            return -1;
        }
        // `push` clears this memory when all has left; if the peer reads a little at a time, that
        // moment may never come.
        if (stream.out_at_ > max_unsent) {
            stream.out_.erase(stream.out_.begin(),
                              stream.out_.begin() + static_cast<std::ptrdiff_t>(stream.out_at_));
            stream.out_at_ = 0;
        }
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

    // Every message of the handshake protocol, either way.
    static void on_message(int is_sent, int, int type, const void* data, size_t count, SSL* ssl,
                           void*) {
        if (type != SSL3_RT_HANDSHAKE || count == 0) return;
        auto& stream = *static_cast<TlsStream*>(BIO_get_data(SSL_get_rbio(ssl)));
        if (!is_sent) {
            ++stream.num_handshakes_;
        } else if (*static_cast<const uint8_t*>(data) == SSL3_MT_KEY_UPDATE) {
            stream.num_keys_.fetch_add(1, std::memory_order_relaxed);
            stream.num_records_ = 0;
        }
    }
};

// -- the context

TlsContext::TlsContext(const std::string& ca, const std::string& chain, bool is_server,
                       uint64_t records_per_key)
    : context_(SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method())),
      is_server_(is_server),
      records_per_key_(records_per_key) {
    ERR_clear_error();
    bool is_made = context_ != nullptr &&
                   SSL_CTX_set_min_proto_version(context_, TLS1_3_VERSION) == 1 &&
                   SSL_CTX_set_max_proto_version(context_, TLS1_3_VERSION) == 1 &&
                   SSL_CTX_set_ciphersuites(context_, ciphers) == 1;
    if (is_made) {
        // No resumption: every connection proves its key anew, and no ticket waits to be read.
        SSL_CTX_set_options(context_, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
        SSL_CTX_set_num_tickets(context_, 0);
        SSL_CTX_set_session_cache_mode(context_, SSL_SESS_CACHE_OFF);
        SSL_CTX_set_mode(context_, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_AUTO_RETRY);
        SSL_CTX_set_verify(context_, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
        SSL_CTX_set_default_read_buffer_len(context_, read_batch_bytes);
        SSL_CTX_set_msg_callback(context_, SocketBio::on_message);
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

// -- one connection

TlsStream::TlsStream(std::shared_ptr<TlsContext> context, int fd, std::string peer)
    : context_(std::move(context)), fd_(fd), peer_(std::move(peer)), ssl_(SSL_new(context_->get())) {
    BIO* bio = BIO_new(SocketBio::method());
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
    if (status == TlsStatus::done) {
        num_handshakes_ = 0;
        num_quiet_ = 0;
    }
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
    if (!reason_.empty()) return TlsStatus::refused;
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

}  // namespace potluck

#endif
