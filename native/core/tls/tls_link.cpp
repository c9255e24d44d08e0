// The half of TlsStream that the loop uses after the handshake: records in and out of two buffers.
//
// Batching. A record holds 16 KiB at most. Sealed records collect in `out_` until eight full ones
// are there, or until the loop has no more to send on this link (`flush`), and leave in one system
// call. One recv() likewise takes up to eight records into `in_`, from where they are opened one by
// one.
#ifdef POTLUCK_OPENSSL

#include <openssl/crypto.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/tls/tls.hpp"

namespace potluck {

namespace {

// The handshake message that announces: the next record is sealed with the next key.
constexpr uint8_t key_update[] = {SSL3_MT_KEY_UPDATE, 0, 0, 1, SSL_KEY_UPDATE_NOT_REQUESTED};
constexpr size_t key_update_bytes = sizeof key_update + record_overhead;
// The size of both buffers: eight full records. The rest leaves room for a key update, which must
// go out before the data that made it due.
constexpr size_t buffer_bytes = 8 * (record_bytes + record_overhead) + key_update_bytes;
// The longest handshake message that is taken after the handshake: a session ticket.
constexpr size_t max_handshake = 16 * 1024;
// How many records without data may follow each other: a peer that sends more only keeps the loop
// busy.
constexpr int max_idle = 32;

constexpr uint8_t unexpected_message = 10;
constexpr uint8_t decode_error = 50;

#ifdef MSG_NOSIGNAL
constexpr int send_flags = MSG_NOSIGNAL;
#else
constexpr int send_flags = 0;
#endif

std::string in_capitals(std::string text) {
    for (char& letter : text) {
        letter = letter == ' ' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
    }
    return text;
}

}  // namespace

// From here on OpenSSL's record layer must not touch the connection again: both would count
// records. Whatever it has decrypted already (the peer may have sent behind its greeting) is read
// out first; part of a record left in its buffers can't be taken over, and ends the link.
void TlsStream::take_over(std::string peer) {
    peer_ = std::move(peer);
    plain_.resize(max_record_bytes);
    while (SSL_pending(ssl_) > 0 && plain_end_ < plain_.size()) {
        const int count = SSL_read(ssl_, plain_.data() + plain_end_,
                                   static_cast<int>(plain_.size() - plain_end_));
        if (count <= 0) break;
        plain_end_ += static_cast<size_t>(count);
    }
    if (SSL_has_pending(ssl_) || has_changed_keys_ || sends_.secret.empty() ||
        receives_.secret.empty()) {
        end_ = "link to " + peer_ + " broke while greeting: its keys can't be taken over";
        return;
    }
    sealing_ = std::make_unique<RecordKey>(ssl_, sends_.secret, sends_.num_records, true);
    opening_ = std::make_unique<RecordKey>(ssl_, receives_.secret, receives_.num_records, false);
    SSL_free_buffers(ssl_);
    in_.resize(buffer_bytes);
    out_.resize(std::max(buffer_bytes, out_end_));
}

// Hand what was sealed to the kernel.
TlsStatus TlsStream::push() {
    while (out_at_ < out_end_) {
        const ssize_t left = ::send(fd_, out_.data() + out_at_, out_end_ - out_at_, send_flags);
        if (left >= 0) {
            out_at_ += static_cast<size_t>(left);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return TlsStatus::wants_write;
        } else if (errno != EINTR) {
            error_ = errno;
            return TlsStatus::failed;
        }
    }
    out_at_ = out_end_ = 0;
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

// -- out

// Add a record to what goes to the kernel; there is room.
void TlsStream::seal(Content type, const uint8_t* data, size_t count) {
    sealing_->seal(out_.data() + out_end_, type, data, count);
    out_end_ += count + record_overhead;
}

size_t TlsStream::send(const uint8_t* data, size_t count) {
    if (!end_.empty()) throw LinkError(end_);
    size_t total = 0;
    while (total < count) {
        const size_t size = std::min(count - total, record_bytes);
        if (out_end_ + size + record_overhead + key_update_bytes > out_.size()) {
            flush();
            if (out_end_ > 0) break;  // the kernel is full; a buffer is reused only when it is empty
        }
        if (is_asked_for_key_ || sealing_->num_records() >= context_->records_per_key()) {
            seal(Content::handshake, key_update, sizeof key_update);
            sealing_->update();
            num_keys_.fetch_add(1, std::memory_order_relaxed);
            is_asked_for_key_ = false;
        }
        seal(Content::data, data + total, size);
        total += size;
    }
    return total;
}

void TlsStream::flush() {
    if (!end_.empty()) throw LinkError(end_);
    if (push() == TlsStatus::failed) end(TlsStatus::failed, "sending");
}

// -- in

// Read from the kernel behind what is in `in_`; false if it has no more now.
bool TlsStream::fill() {
    // The last recv() got less than it asked for, so the kernel's buffer was empty: asking again at
    // once would cost a system call that says EAGAIN.
    if (std::exchange(is_drained_, false)) return false;
    if (in_at_ > 0) {  // what is left is less than one record, so moving it is cheap
        std::memmove(in_.data(), in_.data() + in_at_, in_end_ - in_at_);
        in_end_ -= in_at_;
        in_at_ = 0;
    }
    while (true) {
        const size_t room = in_.size() - in_end_;
        const ssize_t came = ::recv(fd_, in_.data() + in_end_, room, 0);
        if (came > 0) {
            in_end_ += static_cast<size_t>(came);
            is_drained_ = static_cast<size_t>(came) < room;
            return true;
        }
        if (came == 0) end(TlsStatus::ended, "receiving");
        if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
        if (errno == EINTR) continue;
        error_ = errno;
        end(TlsStatus::failed, "receiving");
    }
}

// Open the next record, into `buffer` if it is sure to fit there, else into `plain_`. False if the
// record has not come yet. The cipher writes plaintext before it has checked the record's tag, so
// `buffer` must not be read before this returns: only then are the bytes known to be the peer's.
bool TlsStream::open(uint8_t* buffer, size_t room, size_t& taken) {
    taken = 0;
    const auto has = [this](size_t count) { return in_end_ - in_at_ >= count; };
    while (!has(record_head_bytes)) {
        if (!fill()) return false;
    }
    const size_t length = length_of_record(in_.data() + in_at_);
    while (!has(record_head_bytes + length)) {
        if (!fill()) return false;
    }
    const bool fits = length - record_tag_bytes - 1 <= room;
    uint8_t* const target = fits ? buffer : plain_.data();
    size_t count = 0;
    const Content type = opening_->open(in_.data() + in_at_, length, target, count);
    in_at_ += record_head_bytes + length;
    num_idle_ = type == Content::data && count > 0 ? 0 : num_idle_ + 1;
    if (num_idle_ > max_idle) throw RecordError(unexpected_message, "TOO_MANY_EMPTY_RECORDS");
    if (type == Content::data && fits) {
        taken = count;
    } else if (type == Content::data) {
        plain_at_ = 0;
        plain_end_ = count;
    } else if (type == Content::alert) {
        on_alert(target, count);
    } else {
        on_handshake(target, count);
    }
    if (!handshake_.empty() && type != Content::handshake) {
        throw RecordError(unexpected_message, "UNEXPECTED_MESSAGE");
    }
    return true;
}

void TlsStream::on_alert(const uint8_t* data, size_t count) {
    if (count != 2) throw RecordError(decode_error, "BAD_ALERT");
    if (data[1] == SSL_AD_CLOSE_NOTIFY) end(TlsStatus::ended, "receiving");
    reason_ = "ALERT_" + in_capitals(SSL_alert_desc_string_long(data[1]));
    end(TlsStatus::refused, "receiving");
}

// Handshake messages after the handshake (RFC 8446, 4.6): a KeyUpdate changes the key; a session
// ticket is ignored, because every link makes a full handshake. A message may be spread over
// several records.
void TlsStream::on_handshake(const uint8_t* data, size_t count) {
    handshake_.insert(handshake_.end(), data, data + count);
    constexpr size_t head = 4;
    while (handshake_.size() >= head) {
        const size_t length = static_cast<size_t>(handshake_[1]) << 16 |
                              static_cast<size_t>(handshake_[2]) << 8 | handshake_[3];
        if (length > max_handshake) throw RecordError(decode_error, "EXCESSIVE_MESSAGE_SIZE");
        if (handshake_.size() < head + length) return;
        const uint8_t type = handshake_[0];
        const uint8_t first = length > 0 ? handshake_[head] : 0;
        handshake_.erase(handshake_.begin(),
                         handshake_.begin() + static_cast<std::ptrdiff_t>(head + length));
        if (type == SSL3_MT_NEWSESSION_TICKET) continue;
        // A KeyUpdate must end its record (RFC 8446, 5.1): bytes behind it would belong to two
        // keys.
        if (type != SSL3_MT_KEY_UPDATE || length != 1 || first > 1 || !handshake_.empty()) {
            throw RecordError(unexpected_message, "UNEXPECTED_MESSAGE");
        }
        opening_->update();
        is_asked_for_key_ |= first == SSL_KEY_UPDATE_REQUESTED;  // `send` answers before its next data
    }
}

size_t TlsStream::recv(uint8_t* buffer, size_t count) {
    if (!end_.empty()) throw LinkError(end_);
    size_t total = 0;
    try {
        while (total < count) {
            size_t taken = std::min(count - total, plain_end_ - plain_at_);
            if (taken > 0) {
                std::memcpy(buffer + total, plain_.data() + plain_at_, taken);
                plain_at_ += taken;
            } else if (!open(buffer + total, count - total, taken)) {
                break;
            }
            total += taken;
        }
    } catch (const RecordError& error) {
        const uint8_t alert[] = {SSL3_AL_FATAL, error.alert};
        if (out_end_ + sizeof alert + record_overhead <= out_.size()) {
            seal(Content::alert, alert, sizeof alert);
            push();
        }
        reason_ = error.what();
        end_ = "link to " + peer_ + " broke while receiving: " + reason_;
    } catch (const LinkError&) {
        // `end_` says why. The bytes that came before the end are returned first, the error by the
        // next call.
    }
    if (total == 0 && !end_.empty()) throw LinkError(end_);
    return total;
}

bool TlsStream::is_readable() const {
    if (!end_.empty() || plain_at_ < plain_end_) return true;
    // Whether a whole record waits here. Of half a record the descriptor will show the rest.
    const uint8_t* head = in_.data() + in_at_;
    const size_t has = in_end_ - in_at_;
    return has >= record_head_bytes &&
           has >= record_head_bytes + (static_cast<size_t>(head[3]) << 8 | head[4]);
}

}  // namespace potluck

#endif
