#include "core/tls/local.hpp"

#ifdef POTLUCK_OPENSSL

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "core/tls/send_flags.hpp"

namespace potluck {

namespace {

bool is_later(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// An end of the peer's socket: with bytes unread it is a reset.
bool is_closed(int error) { return error == 0 || error == EPIPE || error == ECONNRESET; }

}  // namespace

LocalStream::LocalStream(int fd, std::shared_ptr<const Killed> killed, std::string peer)
    : fd_(fd), killed_(std::move(killed)), peer_(std::move(peer)) {}

void LocalStream::check() const {
    if (killed_->is_set()) throw LinkError("this worker was killed");
}

std::string LocalStream::ending(int error, const char* doing) const {
    if (is_closed(error)) return peer_ + " closed the link while " + doing;
    return "link to " + peer_ + " failed while " + doing + ": " + std::strerror(error);
}

size_t LocalStream::send(const uint8_t* data, size_t count) {
    check();
    if (!send_end_.empty()) throw LinkError(send_end_);
    size_t total = 0;
    while (total < count) {
        const ssize_t taken = ::send(fd_, data + total, count - total, send_flags);
        if (taken >= 0) {
            total += static_cast<size_t>(taken);
        } else if (is_later(errno)) {
            break;
        } else if (errno != EINTR) {
            // What the peer sent before can still be received.
            send_end_ = ending(errno, "sending");
            throw LinkError(send_end_);
        }
    }
    return total;
}

size_t LocalStream::recv(uint8_t* buffer, size_t count) {
    check();
    size_t total = 0;
    while (total < count && end_.empty()) {
        const ssize_t came = ::recv(fd_, buffer + total, count - total, 0);
        if (came > 0) {
            total += static_cast<size_t>(came);
        } else if (came < 0 && is_later(errno)) {
            break;
        } else if (came == 0 || errno != EINTR) {
            // The bytes that came before the end are returned first, the error by the next call.
            end_ = ending(came == 0 ? 0 : errno, "receiving");
        }
    }
    if (total == 0 && count > 0 && !end_.empty()) throw LinkError(end_);
    return total;
}

}  // namespace potluck

#endif
