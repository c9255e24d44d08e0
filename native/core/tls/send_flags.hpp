// How a stream sends: an end of the connection is an error of send(), not a SIGPIPE, where the system
// can say so by a flag (macOS can't; there Python ignores the signal).
#pragma once

#include <sys/socket.h>

namespace potluck {

#ifdef MSG_NOSIGNAL
constexpr int send_flags = MSG_NOSIGNAL;
#else
constexpr int send_flags = 0;
#endif

}  // namespace potluck
