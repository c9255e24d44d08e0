// What it costs to move bytes through TLS 1.3 in each of several ways: one end of a transfer.
// benchmarks/tls_records.py starts both ends and compares the ways.
//
//     tls_records serve WAY BYTES PEM PORT        prints "listening", receives, prints a line of JSON
//     tls_records call  WAY BYTES PEM PORT HOST   sends, prints a line of JSON
//     tls_records key PEM                         writes a key and its certificate for both ends
//
// WAY: "core" is core/tls (SSL_read and SSL_write over a BIO that moves two records per system
// call); "batch-N" is the same with N records per system call; "socket" is OpenSSL's socket BIO, one
// record per system call; "ktls" leaves records to the kernel; "clear" has no TLS. All use
// TLS_AES_128_GCM_SHA256, a socket that does not block, poll(), and 1 MiB of a 25 MiB buffer at a
// time, as the loop does.
#include <cstdio>

#ifdef POTLUCK_OPENSSL

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/tls/tls.hpp"

using namespace potluck;

namespace {

constexpr size_t buffer_bytes = 25u << 20;
constexpr size_t turn_bytes = 1u << 20;
constexpr uint64_t seldom = uint64_t{1} << 24;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "tls_records: %s (errno: %s)\n", what.c_str(), std::strerror(errno));
    ERR_print_errors_fp(stderr);
    std::exit(1);
}

void require(bool is_true, const char* what) {
    if (!is_true) fail(what);
}

// -- the ways to move bytes that are not core/tls

// No TLS: the floor under all others. It also has what the OpenSSL ways share.
class Socket : public Stream {
public:
    explicit Socket(int fd) : fd_(fd) {}
    void take_over(std::string) override {}
    int fd() const override { return fd_; }
    size_t send(const uint8_t* data, size_t count) override { return put(data, count); }
    void flush() override {}
    size_t unsent() const override { return 0; }
    size_t recv(uint8_t* buffer, size_t count) override { return get(buffer, count); }
    bool is_readable() const override { return false; }

protected:
    // What the kernel took; 0 if it is full.
    size_t put(const uint8_t* data, size_t count) {
        const ssize_t left = ::send(fd_, data, count, MSG_NOSIGNAL);
        if (left >= 0) return static_cast<size_t>(left);
        if (errno != EAGAIN) fail("send");
        return 0;
    }

    // What the kernel had; 0 if nothing has come.
    size_t get(uint8_t* buffer, size_t count) {
        const ssize_t came = ::recv(fd_, buffer, count, 0);
        if (came > 0) return static_cast<size_t>(came);
        if (came == 0) throw LinkError("the other end closed the connection");
        if (errno != EAGAIN) fail("recv");
        return 0;
    }

    int fd_;
};

class Openssl : public Socket {
public:
    Openssl(int fd, SSL_CTX* context, bool is_server) : Socket(fd), ssl_(SSL_new(context)) {
        require(ssl_ != nullptr, "SSL_new");
        is_server ? SSL_set_accept_state(ssl_) : SSL_set_connect_state(ssl_);
    }
    ~Openssl() override { SSL_free(ssl_); }

    SSL* get_ssl() { return ssl_; }

    size_t send(const uint8_t* data, size_t count) override {
        size_t total = 0;
        while (total < count) {
            size_t taken = 0;
            const size_t size = std::min(count - total, record_bytes);
            if (SSL_write_ex(ssl_, data + total, size, &taken) != 1) {
                const int error = SSL_get_error(ssl_, 0);
                if (error == SSL_ERROR_WANT_WRITE) break;
                fail("SSL_write");
            }
            total += taken;
        }
        return total;
    }

    size_t recv(uint8_t* buffer, size_t count) override {
        size_t total = 0;
        while (total < count) {
            size_t taken = 0;
            if (SSL_read_ex(ssl_, buffer + total, count - total, &taken) != 1) {
                const int error = SSL_get_error(ssl_, 0);
                if (error == SSL_ERROR_WANT_READ) break;
                if (total > 0) break;
                throw LinkError("SSL_read ended");
            }
            total += taken;
        }
        return total;
    }

protected:
    SSL* ssl_;
};

// OpenSSL over its own socket BIO.
class OpensslSocket : public Openssl {
public:
    OpensslSocket(int fd, SSL_CTX* context, bool is_server) : Openssl(fd, context, is_server) {
        SSL_set_fd(ssl_, fd);
    }
};

// OpenSSL over a BIO that hands the kernel, and takes from it, several records at a time.
class OpensslBatching : public Openssl {
public:
    OpensslBatching(int fd, SSL_CTX* context, bool is_server, size_t num_records)
        : Openssl(fd, context, is_server), out_(num_records * (record_bytes + record_overhead)) {
        SSL_set_read_ahead(ssl_, 1);
        SSL_set_default_read_buffer_len(ssl_, out_.size());
        BIO* bio = BIO_new(method());
        require(bio != nullptr, "BIO_new");
        BIO_set_data(bio, this);
        BIO_set_init(bio, 1);
        SSL_set_bio(ssl_, bio, bio);
    }

    void flush() override {
        while (out_at_ < out_end_) {
            const size_t left = put(out_.data() + out_at_, out_end_ - out_at_);
            if (left == 0) return;
            out_at_ += left;
        }
        out_at_ = out_end_ = 0;
    }
    size_t unsent() const override { return out_end_ - out_at_; }

private:
    static int write(BIO* bio, const char* data, int count) {
        auto& self = *static_cast<OpensslBatching*>(BIO_get_data(bio));
        BIO_clear_retry_flags(bio);
        const auto size = static_cast<size_t>(count);
        if (self.out_end_ + size > self.out_.size()) {
            self.flush();
            if (self.out_end_ > 0) {
                BIO_set_retry_write(bio);
                return -1;
            }
        }
        std::memcpy(self.out_.data() + self.out_end_, data, size);
        self.out_end_ += size;
        return count;
    }

    // OpenSSL reads ahead: it asks for as much as its own buffer holds.
    static int read(BIO* bio, char* buffer, int count) {
        auto& self = *static_cast<OpensslBatching*>(BIO_get_data(bio));
        BIO_clear_retry_flags(bio);
        const size_t came =
            self.get(reinterpret_cast<uint8_t*>(buffer), static_cast<size_t>(count));
        if (came > 0) return static_cast<int>(came);
        BIO_set_retry_read(bio);
        return -1;
    }

    static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH; }

    static BIO_METHOD* method() {
        static BIO_METHOD* const made = [] {
            BIO_METHOD* method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "batch");
            BIO_meth_set_read(method, read);
            BIO_meth_set_write(method, write);
            BIO_meth_set_ctrl(method, control);
            return method;
        }();
        return made;
    }

    std::vector<uint8_t> out_;
    size_t out_at_ = 0, out_end_ = 0;
};

// -- making a connection

std::string contents(const std::string& path) {
    std::ifstream file(path);
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    require(!text.empty(), "the PEM file is empty: `tls_records key PEM` makes it");
    return text;
}

// A key and a certificate that both ends show and trust.
void make_key(const char* path) {
    EVP_PKEY* key = EVP_EC_gen("P-256");
    X509* certificate = X509_new();
    require(key != nullptr && certificate != nullptr, "a key");
    X509_set_version(certificate, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -60);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 24 * 3600);
    X509_set_pubkey(certificate, key);
    X509_NAME* name = X509_get_subject_name(certificate);
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>("bench"), -1, -1, 0);
    X509_set_issuer_name(certificate, name);
    require(X509_sign(certificate, key, EVP_sha256()) > 0, "a certificate");
    std::FILE* file = std::fopen(path, "w");
    require(file != nullptr && PEM_write_X509(file, certificate) == 1 &&
                PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr) == 1,
            "the PEM file");
    std::fclose(file);
    X509_free(certificate);
    EVP_PKEY_free(key);
}

SSL_CTX* openssl_context(const char* pem, bool uses_kernel) {
    SSL_CTX* context = SSL_CTX_new(TLS_method());
    require(context != nullptr && SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1 &&
                SSL_CTX_use_certificate_file(context, pem, SSL_FILETYPE_PEM) == 1 &&
                SSL_CTX_use_PrivateKey_file(context, pem, SSL_FILETYPE_PEM) == 1 &&
                SSL_CTX_load_verify_locations(context, pem, nullptr) == 1,
            "a TLS context");
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_mode(context, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_ENABLE_PARTIAL_WRITE);
    if (uses_kernel) SSL_CTX_set_options(context, SSL_OP_ENABLE_KTLS);
    return context;
}

int listening(uint16_t port) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    require(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                listen(fd, 1) == 0,
            "listening");
    std::printf("listening\n");
    std::fflush(stdout);
    return fd;
}

int connected(const char* host, uint16_t port) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    require(inet_pton(AF_INET, host, &address.sin_addr) == 1, "an IPv4 address");
    require(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "connecting");
    return fd;
}

void wait_for(const Stream& stream, short events) {
    pollfd each{stream.fd(), events, 0};
    while (poll(&each, 1, 30'000) < 0 && errno == EINTR) {
    }
    require(each.revents != 0, "30 s without progress");
}

// Whether the kernel has kTLS; empty, or why not.
std::string missing_ktls() {
#ifdef TCP_ULP
    const int server = listening(0);
    sockaddr_in address{};
    socklen_t size = sizeof address;
    getsockname(server, reinterpret_cast<sockaddr*>(&address), &size);
    const int fd = connected("127.0.0.1", ntohs(address.sin_port));
    const int result = setsockopt(fd, IPPROTO_TCP, TCP_ULP, "tls", sizeof "tls");
    const std::string reason = std::strerror(errno);
    close(fd);
    close(server);
    return result == 0 ? "" : "setsockopt(TCP_ULP, tls): " + reason;
#else
    return "this system has no TCP_ULP";
#endif
}

// After the handshake of the "ktls" way: empty, or why the kernel does not have the records.
std::string missing_offload(SSL* ssl) {
#ifndef OPENSSL_NO_KTLS
    if (BIO_get_ktls_send(SSL_get_wbio(ssl)) && BIO_get_ktls_recv(SSL_get_rbio(ssl))) return "";
    return "OpenSSL did not hand both directions to the kernel";
#else
    (void)ssl;
    return "this OpenSSL was built without kTLS";
#endif
}

std::shared_ptr<Stream> greeted(const std::string& way, int fd, const char* pem, bool is_server) {
    if (way == "clear") return std::make_shared<Socket>(fd);
    if (way == "core") {
        const std::string text = contents(pem);
        auto context = std::make_shared<TlsContext>(text, text, is_server, seldom);
        auto stream = std::make_shared<TlsStream>(context, fd, "the other end");
        TlsStatus status;
        while ((status = stream->handshake()) != TlsStatus::done) {
            require(status == TlsStatus::wants_read || status == TlsStatus::wants_write, "greeting");
            wait_for(*stream, status == TlsStatus::wants_read ? POLLIN : POLLOUT);
        }
        stream->take_over("the other end");
        return stream;
    }
    SSL_CTX* context = openssl_context(pem, way == "ktls");
    std::shared_ptr<Openssl> stream;
    if (way.rfind("batch-", 0) == 0) {
        const auto num_records = static_cast<size_t>(std::atoi(way.c_str() + 6));
        require(num_records > 0, "batch-N: N records per system call");
        stream = std::make_shared<OpensslBatching>(fd, context, is_server, num_records);
    } else if (way == "socket" || way == "ktls") {
        stream = std::make_shared<OpensslSocket>(fd, context, is_server);
    } else {
        fail("an unknown way: " + way);
    }
    SSL_CTX_free(context);
    int result;
    while ((result = SSL_do_handshake(stream->get_ssl())) != 1) {
        const int error = SSL_get_error(stream->get_ssl(), result);
        require(error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE, "greeting");
        stream->flush();
        wait_for(*stream, error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT);
    }
    while (stream->flush(), stream->unsent() > 0) wait_for(*stream, POLLOUT);
    if (way != "ktls") return stream;
    const std::string reason = missing_offload(stream->get_ssl());
    if (!reason.empty()) fail(reason);
    // The kernel makes records of what is sent in clear, and gives back what was in them.
    struct Offloaded : Socket {
        explicit Offloaded(std::shared_ptr<Openssl> made) : Socket(made->fd()), made(made) {}
        std::shared_ptr<Openssl> made;
    };
    return std::make_shared<Offloaded>(stream);
}

// -- the transfer

void send_all(Stream& stream, const uint8_t* data, size_t count) {
    size_t sent = 0;
    while (sent < count) {
        sent += stream.send(data + sent, std::min(count - sent, turn_bytes));
        stream.flush();
        if (sent < count || stream.unsent() > 0) wait_for(stream, POLLOUT);
    }
    while (stream.flush(), stream.unsent() > 0) wait_for(stream, POLLOUT);
}

void receive_all(Stream& stream, uint8_t* buffer, size_t count) {
    size_t came = 0;
    while (came < count) {
        const size_t some = stream.recv(buffer + came, std::min(count - came, turn_bytes));
        came += some;
        if (some == 0) wait_for(stream, POLLIN);
    }
}

double cpu_seconds() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    const auto seconds = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    return seconds(used.ru_utime) + seconds(used.ru_stime);
}

int transfer(Stream& stream, bool sends, uint64_t total) {
    std::vector<uint8_t> buffer(buffer_bytes);
    for (size_t at = 0; at < buffer.size(); ++at) buffer[at] = static_cast<uint8_t>(at * 167 >> 3);
    uint8_t word = 1;
    // One buffer and one word either way first: TCP has found its window, pages are touched.
    const auto once = [&](uint64_t count) {
        for (uint64_t left = count; left > 0;) {
            const size_t size = std::min<uint64_t>(left, buffer.size());
            sends ? send_all(stream, buffer.data(), size)
                  : receive_all(stream, buffer.data(), size);
            left -= size;
        }
        sends ? receive_all(stream, &word, 1) : send_all(stream, &word, 1);
    };
    once(buffer.size());
    const double cpu = cpu_seconds();
    const auto begin = std::chrono::steady_clock::now();
    once(total);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("{\"seconds\": %.6f, \"cpu_s\": %.6f}\n", seconds.count(), cpu_seconds() - cpu);
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    const std::string role = count > 1 ? arguments[1] : "";
    if (role == "key" && count == 3) {
        make_key(arguments[2]);
        return 0;
    }
    const bool is_server = role == "serve" && count == 6;
    if (!is_server && !(role == "call" && count == 7)) fail("see the head of its source");
    const std::string way = arguments[2];
    if (const std::string reason = way == "ktls" ? missing_ktls() : ""; !reason.empty()) {
        std::printf("{\"missing\": \"%s\"}\n", reason.c_str());
        return 0;
    }
    const auto port = static_cast<uint16_t>(std::atoi(arguments[5]));
    int fd = -1;
    if (is_server) {
        const int server = listening(port);
        fd = accept(server, nullptr, nullptr);
        close(server);
    } else {
        fd = connected(arguments[6], port);
    }
    require(fd >= 0, "a connection");
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    const std::shared_ptr<Stream> stream = greeted(way, fd, arguments[4], is_server);
    return transfer(*stream, !is_server, std::strtoull(arguments[3], nullptr, 10));
}

#else

int main() {
    std::puts("{\"missing\": \"the core was built without OpenSSL\"}");
    return 0;
}

#endif
