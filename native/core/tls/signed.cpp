#include "core/tls/signed.hpp"

#ifdef POTLUCK_OPENSSL

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/tls/send_flags.hpp"

namespace potluck {

namespace {

// The header and the payload of a frame; a record has head and tag around them.
constexpr size_t max_pieces = 2;

bool is_later(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// Calls `take` with each part of the pieces from `skip` on, `count` bytes at most.
template <typename Take>
void each_part(const Piece* pieces, size_t num, size_t skip, size_t count, const Take& take) {
    for (size_t index = 0; index < num && count > 0; ++index) {
        const size_t skipped = std::min(skip, pieces[index].count);
        const size_t part = std::min(count, pieces[index].count - skipped);
        skip -= skipped;
        count -= part;
        if (part > 0) take(pieces[index].data + skipped, part);
    }
}

}  // namespace

SignedStream::SignedStream(int fd, const uint8_t* sends, const uint8_t* receives,
                           uint64_t records_per_key, std::string peer)
    : fd_(fd),
      peer_(std::move(peer)),
      incoming_(2 * (signed_record_bytes + signed_overhead)) {
    sends_.emplace(sends, records_per_key);
    receives_.emplace(receives, records_per_key);
}

void SignedStream::broke(const std::string& reason) {
    sends_.reset();
    receives_.reset();
    end_ = "link to " + peer_ + " broke while receiving: " + reason;
    throw LinkError(end_);
}

void SignedStream::failed(std::string& why, int error, const char* doing) {
    why = error == 0 ? peer_ + " closed the connection while " + doing
                      : "connection to " + peer_ + " failed while " + doing + ": " +
                            std::strerror(error);
    throw LinkError(why);
}

// -- sending

size_t SignedStream::send(const uint8_t* data, size_t count) {
    const Piece piece{data, count};
    return send(&piece, 1);
}

size_t SignedStream::send(const Piece* pieces, size_t num) {
    if (!send_end_.empty()) throw LinkError(send_end_);
    if (!end_.empty()) throw LinkError(end_);
    num = std::min(num, max_pieces);
    size_t offered = 0;
    for (size_t index = 0; index < num; ++index) offered += pieces[index].count;
    size_t total = 0;
    while (total < offered) {
        if (size_ == 0) begin(pieces, num, total, std::min(offered - total, signed_record_bytes));
        const size_t before = taken();
        const bool is_whole = push(pieces, num, total);
        total += taken() - before;
        if (!is_whole) break;  // the kernel is full
        size_ = sent_ = 0;
    }
    return total;
}

void SignedStream::begin(const Piece* pieces, size_t num, size_t skip, size_t count) {
    for (size_t index = 0; index < head_.size(); ++index) {
        head_[index] = static_cast<uint8_t>(count >> (8 * index));
    }
    sends_->begin();
    sends_->add(head_.data(), head_.size());
    each_part(pieces, num, skip, count,
              [&](const uint8_t* data, size_t part) { sends_->add(data, part); });
    tag_ = sends_->end();
    size_ = count;
    sent_ = 0;
}

// Send what is left of the record, the rest of whose data begins `skip` bytes into the pieces; true
// if all has left.
bool SignedStream::push(const Piece* pieces, size_t num, size_t skip) {
    std::array<iovec, max_pieces + 2> parts{};
    msghdr message{};
    message.msg_iov = parts.data();
    const auto add = [&](const uint8_t* data, size_t count) {
        // The kernel only reads them.
        parts[message.msg_iovlen++] = {const_cast<uint8_t*>(data), count};
    };
    const size_t head = std::min(sent_, head_.size());
    if (head < head_.size()) add(head_.data() + head, head_.size() - head);
    const size_t data = std::min(sent_ - head, size_);
    each_part(pieces, num, skip + data - taken(), size_ - data, add);
    const size_t behind = sent_ - head - data;
    add(tag_.data() + behind, tag_bytes - behind);
    while (true) {
        const ssize_t left = ::sendmsg(fd_, &message, send_flags);
        if (left >= 0) {
            sent_ += static_cast<size_t>(left);
            return sent_ == size_ + signed_overhead;
        }
        if (is_later(errno)) return false;
        if (errno != EINTR) failed(send_end_, errno, "sending");
    }
}

// -- receiving

size_t SignedStream::recv(uint8_t* buffer, size_t count) {
    size_t total = 0;
    is_starved_ = false;
    try {
        while (total < count) {
            const size_t part = std::min(count - total, end_of_data_ - at_);
            if (part == 0 && !next_record()) {
                is_starved_ = true;
                break;
            }
            std::memcpy(buffer + total, incoming_.data() + at_, part);
            at_ += part;
            total += part;
        }
    } catch (const LinkError&) {
        if (total == 0) throw;  // the bytes that came before the end are returned first
    }
    return total;
}

// Whether another record is whole, and its tag right.
bool SignedStream::next_record() {
    if (!end_.empty()) throw LinkError(end_);
    std::optional<size_t> length = length_of_next();
    while (!length) {
        if (!fill()) return false;
        length = length_of_next();
    }
    const uint8_t* record = incoming_.data() + next_;
    receives_->begin();
    receives_->add(record, signed_length_bytes + *length);
    if (!are_same(receives_->end(), record + signed_length_bytes + *length)) {
        broke("a record's tag is wrong: its bytes were changed, added or left out");
    }
    at_ = next_ + signed_length_bytes;
    end_of_data_ = at_ + *length;
    next_ = end_of_data_ + tag_bytes;
    return true;
}

// The length of the next record's data, once all of the record is here.
std::optional<size_t> SignedStream::length_of_next() {
    const size_t have = filled_ - next_;
    if (have < signed_length_bytes) return std::nullopt;
    size_t length = 0;
    for (size_t index = 0; index < signed_length_bytes; ++index) {
        length |= static_cast<size_t>(incoming_[next_ + index]) << (8 * index);
    }
    if (length == 0 || length > signed_record_bytes) {
        broke("a record of " + std::to_string(length) + " bytes; at most " +
              std::to_string(signed_record_bytes) + " are allowed");
    }
    if (have < length + signed_overhead) return std::nullopt;
    return length;
}

// Receive once; false if there was nothing.
bool SignedStream::fill() {
    if (std::exchange(is_drained_, false)) return false;
    compact();
    const size_t room = incoming_.size() - filled_;
    while (true) {
        const ssize_t came = ::recv(fd_, incoming_.data() + filled_, room, 0);
        if (came > 0) {
            filled_ += static_cast<size_t>(came);
            // Asking again at once would cost a system call that says EAGAIN.
            is_drained_ = static_cast<size_t>(came) < room;
            return true;
        }
        if (came < 0 && is_later(errno)) return false;
        if (came == 0 || errno != EINTR) failed(end_, came == 0 ? 0 : errno, "receiving");
    }
}

// Make room for a whole record, if there is not.
void SignedStream::compact() {
    if (next_ + signed_record_bytes + signed_overhead <= incoming_.size() && next_ < filled_) return;
    std::memmove(incoming_.data(), incoming_.data() + next_, filled_ - next_);
    filled_ -= next_;
    at_ = end_of_data_ = next_ = 0;
}

bool SignedStream::is_readable() const {
    return !end_.empty() || (!is_starved_ && (at_ < end_of_data_ || next_ < filled_));
}

}  // namespace potluck

#endif
