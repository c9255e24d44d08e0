#include "core/tls/plain.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/tls/send_flags.hpp"

namespace potluck {

namespace {

// As many as a frame has: header, payload, checksum.
constexpr size_t max_pieces = 3;

bool is_later(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

void PlainStream::end(std::string& why, int error, const char* doing) {
    why = error == 0 ? peer_ + " closed the connection while " + doing
                      : "connection to " + peer_ + " failed while " + doing + ": " +
                            std::strerror(error);
    throw LinkError(why);
}

size_t PlainStream::send(const uint8_t* data, size_t count) {
    const Piece piece{data, count};
    return send(&piece, 1);
}

size_t PlainStream::send(const Piece* pieces, size_t num) {
    if (!send_end_.empty()) throw LinkError(send_end_);
    if (!end_.empty()) throw LinkError(end_);
    std::array<iovec, max_pieces> parts{};
    msghdr message{};
    message.msg_iov = parts.data();
    size_t wanted = 0;
    for (size_t index = 0; index < std::min(num, max_pieces); ++index) {
        // The kernel only reads them.
        parts[index] = {const_cast<uint8_t*>(pieces[index].data), pieces[index].count};
        wanted += pieces[index].count;
        ++message.msg_iovlen;
    }
    while (wanted > 0) {
        const ssize_t taken = ::sendmsg(fd_, &message, send_flags);
        if (taken >= 0) return static_cast<size_t>(taken);
        if (is_later(errno)) break;
        if (errno != EINTR) end(send_end_, errno, "sending");
    }
    return 0;
}

size_t PlainStream::recv(uint8_t* buffer, size_t count) {
    if (!end_.empty()) throw LinkError(end_);
    while (count > 0) {
        const ssize_t came = ::recv(fd_, buffer, count, 0);
        if (came > 0) return static_cast<size_t>(came);
        if (came < 0 && is_later(errno)) break;
        if (came == 0 || errno != EINTR) end(end_, came == 0 ? 0 : errno, "receiving");
    }
    return 0;
}

}  // namespace potluck
