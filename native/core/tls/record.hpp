// One direction of a TLS 1.3 connection after the handshake: it seals and opens records and changes
// keys (RFC 8446, sections 5, 7.2 and 7.3). The cipher is OpenSSL's.
//
// Why not SSL_read and SSL_write: OpenSSL's own record layer copies every byte twice more, and asks
// the kernel once for each record of 16 KiB. Here a record is sealed from the user's memory into
// the buffer that goes to the kernel, and opened from the buffer that the kernel filled into the
// memory where the bytes belong.
#pragma once

#ifdef POTLUCK_OPENSSL

#include <openssl/ssl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace potluck {

constexpr size_t record_bytes = 16 * 1024;  // of plaintext, at most
constexpr size_t record_head_bytes = 5;
constexpr size_t record_tag_bytes = 16;
// What sealing adds: the head, the type behind the bytes, the tag.
constexpr size_t record_overhead = record_head_bytes + 1 + record_tag_bytes;
// Behind the head of a record that a peer may send: it may pad.
constexpr size_t max_record_bytes = record_bytes + 256;

// What is in a record.
enum class Content : uint8_t { change = 20, alert = 21, handshake = 22, data = 23 };

// The two ends did not agree on a record: `alert` is what TLS tells the peer, what() OpenSSL's
// name.
struct RecordError : std::runtime_error {
    RecordError(uint8_t alert, const std::string& reason)
        : std::runtime_error(reason), alert(alert) {}
    const uint8_t alert;
};

// The length behind a record's head. RecordError if no such record can come.
size_t length_of_record(const uint8_t* head);

class RecordKey {
public:
    // `secret`: this direction's traffic secret; `count`: records that it has protected already.
    RecordKey(const SSL* ssl, std::vector<uint8_t> secret, uint64_t count, bool seals);
    ~RecordKey();
    RecordKey(const RecordKey&) = delete;
    RecordKey& operator=(const RecordKey&) = delete;

    // Write `count` bytes (at most `record_bytes`) as one record; it is `record_overhead` longer.
    void seal(uint8_t* record, Content type, const uint8_t* data, size_t count);

    // Open a record: its head with `length` bytes behind it. `data` gets what is in it, `length`
    // less `record_tag_bytes + 1` at most. It is not to be used before this has returned.
    Content open(const uint8_t* record, size_t length, uint8_t* data, size_t& count);

    // The next key, after a KeyUpdate.
    void update();

    uint64_t num_records() const { return count_; }

private:
    void derive();
    std::vector<uint8_t> expand(const std::string& label, size_t count) const;
    void start(const uint8_t* head);

    struct FreeCipher {
        void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
    };

    const EVP_CIPHER* cipher_;
    const EVP_MD* digest_;
    const bool seals_;
    std::vector<uint8_t> secret_;
    std::array<uint8_t, 12> iv_{};
    uint64_t count_;
    std::unique_ptr<EVP_CIPHER_CTX, FreeCipher> context_;
};

}  // namespace potluck

#endif
