// A native TLS stream against plain OpenSSL at the other end, for each cipher and both
// roles: records of any size, with and without padding, keys that either end changes or asks the
// other to change, a socket that takes and gives a little at a time, and what no peer may send.
//
//     tls_test
#include <cstdio>

#ifdef POTLUCK_OPENSSL

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/tls/tls.hpp"

using namespace potluck;

namespace {

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            ERR_print_errors_fp(stderr);                                              \
            std::_Exit(1);                                                            \
        }                                                                             \
    } while (false)

constexpr uint64_t SELDOM = uint64_t{1} << 24;
constexpr int MOST_TURNS = 1'000'000;

// A key and its certificate, which both ends show and trust.
struct Identity {
    Identity() : key(EVP_EC_gen("P-256")), certificate(X509_new()) {
        CHECK(key != nullptr && certificate != nullptr);
        X509_set_version(certificate, 2);
        ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
        X509_gmtime_adj(X509_getm_notBefore(certificate), -60);
        X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
        X509_set_pubkey(certificate, key);
        X509_NAME* name = X509_get_subject_name(certificate);
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                                   reinterpret_cast<const unsigned char*>("test"), -1, -1, 0);
        X509_set_issuer_name(certificate, name);
        CHECK(X509_sign(certificate, key, EVP_sha256()) > 0);
    }
    ~Identity() {
        X509_free(certificate);
        EVP_PKEY_free(key);
    }

    std::string pem(bool with_key) const {
        BIO* bio = BIO_new(BIO_s_mem());
        CHECK(PEM_write_bio_X509(bio, certificate) == 1);
        if (with_key) {
            CHECK(PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
        }
        char* at = nullptr;
        const long count = BIO_get_mem_data(bio, &at);
        std::string text(at, static_cast<size_t>(count));
        BIO_free(bio);
        return text;
    }

    EVP_PKEY* key;
    X509* certificate;
};

// A native stream and an OpenSSL peer that have greeted each other.
struct Pair {
    Pair(const Identity& identity, const char* cipher, bool is_server, uint64_t records_per_key) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
        const int small = 4096;  // the kernel doubles it
        for (int fd : fds) {
            fcntl(fd, F_SETFL, O_NONBLOCK);
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
        }
        stream = std::make_unique<TlsStream>(
            std::make_shared<TlsContext>(identity.pem(false), identity.pem(true), is_server,
                                         records_per_key),
            fds[0], "the peer");
        SSL_CTX* context = SSL_CTX_new(TLS_method());
        CHECK(SSL_CTX_set_ciphersuites(context, cipher) == 1);
        CHECK(SSL_CTX_use_certificate(context, identity.certificate) == 1);
        CHECK(SSL_CTX_use_PrivateKey(context, identity.key) == 1);
        SSL_CTX_set_mode(context,
                         SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        peer = SSL_new(context);
        SSL_CTX_free(context);
        SSL_set_fd(peer, fds[1]);
        is_server ? SSL_set_connect_state(peer) : SSL_set_accept_state(peer);
        bool is_done = false, is_peer_done = false;
        for (int turn = 0; turn < MOST_TURNS && !(is_done && is_peer_done); ++turn) {
            if (!is_done) {
                const TlsStatus status = stream->handshake();
                is_done = status == TlsStatus::done;
                CHECK(is_done || status == TlsStatus::wants_read ||
                      status == TlsStatus::wants_write);
            }
            if (!is_peer_done) is_peer_done = SSL_do_handshake(peer) == 1;
        }
        CHECK(is_done && is_peer_done);
        CHECK(std::string(cipher) == SSL_get_cipher_name(peer));
        stream->take_over("the peer");
    }
    ~Pair() {
        SSL_free(peer);
        stream.reset();
        for (int fd : fds) close(fd);
    }

    int fds[2];
    std::unique_ptr<TlsStream> stream;
    SSL* peer;
};

std::vector<uint8_t> random_bytes(std::mt19937& random, size_t count) {
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
}

// Mostly short, sometimes more than several records; at most `left`.
size_t some(std::mt19937& random, size_t left) {
    const size_t most[] = {1, 50, 5'000, 17'000, 70'000};
    return std::min<size_t>(left, 1 + random() % most[random() % 5]);
}

// Both directions at once. The peer changes its keys on the way, and asks for others.
void check_exchange(Pair& pair, unsigned seed, bool changes_keys) {
    std::mt19937 random(seed);
    constexpr size_t total = 600'000;
    const std::vector<uint8_t> there = random_bytes(random, total);
    const std::vector<uint8_t> back = random_bytes(random, total);
    std::vector<uint8_t> at_peer(total), at_stream(total);
    size_t sent = 0, came = 0, peer_sent = 0, peer_came = 0;
    size_t offered = 0;  // what OpenSSL could not write must be offered again
    int num_updates = 0;
    for (int turn = 0; came < total || peer_came < total; ++turn) {
        CHECK(turn < MOST_TURNS);
        if (sent < total) sent += pair.stream->send(there.data() + sent, some(random, total - sent));
        pair.stream->flush();
        if (peer_sent < total) {
            if (changes_keys && random() % 4 == 0) {
                const int type =
                    random() % 2 ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED;
                num_updates += SSL_key_update(pair.peer, type);  // not while a record is half out
                ERR_clear_error();
            }
            if (offered == 0) offered = some(random, total - peer_sent);
            size_t count = 0;
            if (SSL_write_ex(pair.peer, back.data() + peer_sent, offered, &count) == 1) {
                peer_sent += count;
                offered = 0;
            } else {
                CHECK(SSL_get_error(pair.peer, 0) == SSL_ERROR_WANT_WRITE);
            }
        }
        if (came < total) {
            came += pair.stream->recv(at_stream.data() + came, some(random, total - came));
        }
        if (peer_came < total) {
            size_t count = 0;
            if (SSL_read_ex(pair.peer, at_peer.data() + peer_came, some(random, total - peer_came),
                            &count) == 1) {
                peer_came += count;
            } else {
                const int error = SSL_get_error(pair.peer, 0);  // it may owe a KeyUpdate
                CHECK(error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE);
            }
        }
    }
    CHECK(at_stream == back);
    CHECK(at_peer == there);
    CHECK(!changes_keys || num_updates > 3);
    // The peer has stopped reading when its last byte came: answers to its KeyUpdates wait for it.
    for (int turn = 0; pair.stream->unsent() > 0; ++turn) {
        CHECK(turn < MOST_TURNS);
        uint8_t none = 0;
        CHECK(SSL_read(pair.peer, &none, 1) <= 0);
        ERR_clear_error();
        pair.stream->flush();
    }
}

// The next byte that comes; a stream that took all there was may first say that there is none.
uint8_t next_byte(TlsStream& stream) {
    uint8_t byte = 0;
    for (int turn = 0; turn < MOST_TURNS; ++turn) {
        if (stream.recv(&byte, 1) == 1) return byte;
    }
    CHECK(false);
    return 0;
}

// A key that the peer asks for comes before more data, and only once.
void check_request(Pair& pair) {
    const auto say = [&](const char* text) {
        CHECK(SSL_write(pair.peer, text, 1) == 1);
        CHECK(next_byte(*pair.stream) == static_cast<uint8_t>(text[0]));
    };
    const auto answer = [&](uint8_t byte) {
        CHECK(pair.stream->send(&byte, 1) == 1);
        pair.stream->flush();
        uint8_t heard = 0;
        CHECK(SSL_read(pair.peer, &heard, 1) == 1 && heard == byte);
    };
    answer('a');  // what was asked for before, too
    const uint64_t before = pair.stream->num_keys();
    CHECK(SSL_key_update(pair.peer, SSL_KEY_UPDATE_NOT_REQUESTED) == 1);
    say("b");
    answer('c');
    CHECK(pair.stream->num_keys() == before);
    CHECK(SSL_key_update(pair.peer, SSL_KEY_UPDATE_REQUESTED) == 1);
    say("d");
    answer('e');
    answer('f');
    CHECK(pair.stream->num_keys() == before + 1);
}

std::string end_of(TlsStream& stream) {
    uint8_t bytes[64];
    try {
        for (int turn = 0; turn < MOST_TURNS; ++turn) stream.recv(bytes, sizeof bytes);
    } catch (const LinkError& error) {
        return error.what();
    }
    return "";
}

// Bytes that OpenSSL would not have sent end the link; what is wrong is told to the peer.
void check_refusal(const Identity& identity, const std::vector<uint8_t>& bytes, const char* why,
                   int alert) {
    Pair pair(identity, "TLS_AES_128_GCM_SHA256", true, SELDOM);
    CHECK(SSL_write(pair.peer, "x", 1) == 1);
    CHECK(::write(pair.fds[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    CHECK(next_byte(*pair.stream) == 'x');  // what came before counts
    const std::string end = end_of(*pair.stream);
    CHECK(end.find("link to the peer broke while receiving: ") == 0);
    if (end.find(why) == std::string::npos) {
        std::fprintf(stderr, "expected %s, heard: %s\n", why, end.c_str());
        CHECK(false);
    }
    ERR_clear_error();
    uint8_t heard = 0;
    CHECK(SSL_read(pair.peer, &heard, 1) <= 0);
    CHECK(ERR_GET_REASON(ERR_get_error()) == SSL_AD_REASON_OFFSET + alert);
}

// The peer asks for a new key once; how often it has to be repeated until the socket takes it.
void ask_for_key(Pair& pair) {
    if (SSL_get_key_update_type(pair.peer) == SSL_KEY_UPDATE_NONE) {
        SSL_key_update(pair.peer, SSL_KEY_UPDATE_REQUESTED);  // not while a record is half out
    }
    SSL_do_handshake(pair.peer);
    ERR_clear_error();
}

// A peer that sends KeyUpdates and no data is not listened to for ever.
void check_only_handshakes(const Identity& identity) {
    Pair pair(identity, "TLS_AES_128_GCM_SHA256", true, SELDOM);
    uint8_t byte = 0;
    std::string end;
    for (int turn = 0; turn < 100 && end.empty(); ++turn) {
        ask_for_key(pair);
        try {
            CHECK(pair.stream->recv(&byte, 1) == 0);
        } catch (const LinkError& error) {
            end = error.what();
        }
    }
    CHECK(end.find("TOO_MANY_HANDSHAKE_MESSAGES") != std::string::npos);
}

// A peer that asks for keys between its data and reads no answer does not fill the memory.
void check_unread_answers(const Identity& identity) {
    Pair pair(identity, "TLS_AES_128_GCM_SHA256", true, SELDOM);
    const std::vector<uint8_t> data(record_bytes, 1);
    std::vector<uint8_t> room(2 * record_bytes);
    std::string end;
    for (int turn = 0; turn < MOST_TURNS && end.empty(); ++turn) {
        ask_for_key(pair);
        SSL_write(pair.peer, data.data(), 1);
        ERR_clear_error();
        CHECK(pair.stream->unsent() <= 256 * 1024 + record_bytes);
        try {
            pair.stream->recv(room.data(), room.size());
        } catch (const LinkError& error) {
            end = error.what();
        }
    }
    CHECK(end.find("TOO_MANY_UNREAD_RECORDS") != std::string::npos);
}

// Nor does a peer that asks for keys and reads the answers so slowly that some always wait.
void check_slow_answers(const Identity& identity) {
    Pair pair(identity, "TLS_AES_128_GCM_SHA256", true, SELDOM);
    uint8_t byte = 1;
    for (int round = 0; round < 40'000; ++round) {
        ask_for_key(pair);
        SSL_write(pair.peer, &byte, 1);
        while (pair.stream->recv(&byte, 1) > 0) {
        }
        if (pair.stream->unsent() > 64 * 1024) {
            SSL_read(pair.peer, &byte, 1);  // no data: all answers that fit into one read
        }
        ERR_clear_error();
    }
    CHECK(pair.stream->buffer_bytes() < 1u << 20);
}

// What a peer has said before it closed its socket can be read although a send to it has failed.
void check_last_words(const Identity& identity) {
    Pair pair(identity, "TLS_AES_128_GCM_SHA256", true, SELDOM);
    CHECK(SSL_write(pair.peer, "bye", 3) == 3);
    SSL_set_quiet_shutdown(pair.peer, 1);
    close(pair.fds[1]);
    bool has_failed = false;
    const std::vector<uint8_t> data(record_bytes, 1);
    for (int turn = 0; turn < 100 && !has_failed; ++turn) {
        try {
            pair.stream->send(data.data(), data.size());
            pair.stream->flush();
        } catch (const LinkError&) {
            has_failed = true;
        }
    }
    CHECK(has_failed);
    uint8_t bytes[8];
    CHECK(pair.stream->recv(bytes, sizeof bytes) == 3 && bytes[0] == 'b');
    CHECK(!end_of(*pair.stream).empty());
}

void check_end(const Identity& identity, bool says_so) {
    Pair pair(identity, "TLS_AES_128_GCM_SHA256", true, SELDOM);
    CHECK(SSL_write(pair.peer, "x", 1) == 1);
    if (says_so) {
        SSL_shutdown(pair.peer);
    } else {
        shutdown(pair.fds[1], SHUT_WR);
    }
    uint8_t bytes[8];
    CHECK(pair.stream->recv(bytes, sizeof bytes) == 1 && bytes[0] == 'x');
    CHECK(end_of(*pair.stream).find("closed the connection") != std::string::npos);
}

}  // namespace

int main() {
    const Identity identity;
    unsigned seed = 0;
    for (const char* cipher : {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384",
                               "TLS_CHACHA20_POLY1305_SHA256"}) {
        for (const bool is_server : {false, true}) {
            for (const uint64_t records_per_key : {uint64_t{2}, SELDOM}) {
                Pair pair(identity, cipher, is_server, records_per_key);
                check_exchange(pair, ++seed, false);
                CHECK((pair.stream->num_keys() > 10) == (records_per_key == 2));
                SSL_set_block_padding(pair.peer, 512);
                SSL_set_max_send_fragment(pair.peer, 700);
                check_exchange(pair, ++seed, true);
                if (records_per_key == SELDOM) check_request(pair);
            }
        }
    }
    std::vector<uint8_t> record(5 + 40, 7);
    const auto begin = [&](uint8_t type, size_t length) {
        const uint8_t head[] = {type, 3, 3, static_cast<uint8_t>(length >> 8),
                                static_cast<uint8_t>(length)};
        std::copy(head, head + sizeof head, record.begin());
    };
    // The name of what is wrong is OpenSSL's, and differs between its versions; the alert is TLS's.
    begin(23, 40);
    check_refusal(identity, record, "DECRYPTION_FAILED_OR_BAD_RECORD_MAC", SSL_AD_BAD_RECORD_MAC);
    for (const size_t length : {record_bytes + 256 + 1, size_t{65535}}) {
        begin(23, length);
        check_refusal(identity, record, "LENGTH_TOO_LONG", SSL_AD_RECORD_OVERFLOW);
    }
    for (const size_t length : {16, 0}) {
        begin(23, length);
        check_refusal(identity, record, "", SSL_AD_BAD_RECORD_MAC);
    }
    begin(20, 1);
    check_refusal(identity, record, "", SSL_AD_UNEXPECTED_MESSAGE);
    begin(21, 2);
    check_refusal(identity, record, "", SSL_AD_UNEXPECTED_MESSAGE);
    check_only_handshakes(identity);
    check_unread_answers(identity);
    check_slow_answers(identity);
    check_last_words(identity);
    check_end(identity, true);
    check_end(identity, false);
    std::puts("tls: all checks passed");
    return 0;
}

#else

int main() {
    std::puts("tls: built without OpenSSL, so there is nothing to check");
    return 0;
}

#endif
