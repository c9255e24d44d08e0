// The half of TlsStream that the progress loop uses after the greeting.
#ifdef POTLUCK_OPENSSL

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/tls/send_flags.hpp"
#include "core/tls/tls.hpp"

namespace potluck {

// Until here OpenSSL asked the kernel for one record at a time: Python waits on the descriptor, which
// would not show a record that had been read ahead. From here on one recv() takes as many records as
// there is room for; `is_readable` tells the loop of those that wait.
void TlsStream::take_over(std::string peer) {
    peer_ = std::move(peer);
    num_handshakes_ = 0;
    num_quiet_ = 0;
    SSL_set_read_ahead(ssl_, 1);
    out_.reserve(std::max(out_.size(), write_batch_bytes));
}

// Hand the records that wait to the kernel.
TlsStatus TlsStream::push() {
    while (out_at_ < out_.size()) {
        const ssize_t left = ::send(fd_, out_.data() + out_at_, out_.size() - out_at_, send_flags);
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

// Why the link is over, in words.
std::string TlsStream::ending(TlsStatus status, const char* doing) const {
    if (status == TlsStatus::ended) return peer_ + " closed the connection while " + doing;
    if (status == TlsStatus::failed) {
        return "connection to " + peer_ + " failed while " + doing + ": " + std::strerror(error_);
    }
    return "link to " + peer_ + " broke while " + doing + ": " + reason_;
}

void TlsStream::check_sending() const {
    if (!send_end_.empty()) throw LinkError(send_end_);
    if (!end_.empty()) throw LinkError(end_);
}

size_t TlsStream::send(const uint8_t* data, size_t count) {
    check_sending();
    size_t total = 0;
    while (total < count) {
        const size_t size = std::min(count - total, record_bytes);
        // A record is encrypted only when there is room for it: a write that OpenSSL has begun and
        // not ended would have to be repeated with the same bytes.
        if (out_.size() + size + record_overhead > write_batch_bytes) {
            flush();
            if (unsent() > 0) break;  // the kernel is full
        }
        if (num_records_ >= context_->records_per_key()) {
            SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED);
        }
        size_t taken = 0;
        ERR_clear_error();
        const TlsStatus status = judge(SSL_write_ex(ssl_, data + total, size, &taken));
        if (status == TlsStatus::wants_read) reason_ = "HALF_A_HANDSHAKE_MESSAGE";
        if (status != TlsStatus::done) {
            end_ = ending(status, "sending");  // OpenSSL is not to be called again
            throw LinkError(end_);
        }
        ++num_records_;
        total += taken;
    }
    return total;
}

// A peer that has sent its last words and closed its socket refuses these bytes; its words can still
// be received.
void TlsStream::flush() {
    check_sending();
    if (push() != TlsStatus::failed) return;
    send_end_ = ending(TlsStatus::failed, "sending");
    error_ = 0;
    is_drained_ = false;  // so that the next `recv` does ask the kernel
    throw LinkError(send_end_);
}

size_t TlsStream::recv(uint8_t* buffer, size_t count) {
    if (!end_.empty()) throw LinkError(end_);
    size_t total = 0;
    const size_t num_waiting = unsent();
    is_starved_ = false;
    while (total < count) {
        size_t taken = 0;
        ERR_clear_error();
        const TlsStatus status = judge(SSL_read_ex(ssl_, buffer + total, count - total, &taken));
        total += taken;
        if (status == TlsStatus::done) {
            num_handshakes_ = 0;
            num_quiet_ = 0;
            continue;
        }
        is_starved_ = status == TlsStatus::wants_read;
        if (is_starved_) break;
        // The bytes that came before the end are returned first, the error by the next call.
        end_ = ending(status, "receiving");
        break;
    }
    // OpenSSL may have something to say: an answer to a KeyUpdate, or the alert that tells the peer
    // what was wrong.
    if (unsent() > num_waiting && push() == TlsStatus::failed) error_ = 0;
    if (total == 0 && !end_.empty()) throw LinkError(end_);
    return total;
}

// Of half a record the descriptor will show the rest.
bool TlsStream::is_readable() const {
    return !end_.empty() || (!is_starved_ && SSL_has_pending(ssl_));
}

}  // namespace potluck

#endif
