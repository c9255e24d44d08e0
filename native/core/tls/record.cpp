#include "core/tls/record.hpp"

#ifdef POTLUCK_OPENSSL

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <algorithm>
#include <stdexcept>

namespace potluck {

namespace {

constexpr uint8_t unexpected_message = 10;
constexpr uint8_t bad_record_mac = 20;
constexpr uint8_t record_overflow = 22;

void check(bool is_done, const char* what) {
    if (!is_done) throw std::runtime_error(std::string("OpenSSL failed: ") + what);
}

}  // namespace

size_t length_of_record(const uint8_t* head) {
    if (head[0] != static_cast<uint8_t>(Content::data)) {
        throw RecordError(unexpected_message, "UNEXPECTED_MESSAGE");
    }
    const size_t length = static_cast<size_t>(head[3]) << 8 | head[4];
    if (length > max_record_bytes) throw RecordError(record_overflow, "PACKET_LENGTH_TOO_LONG");
    if (length <= record_tag_bytes) throw RecordError(bad_record_mac, "LENGTH_TOO_SHORT");
    return length;
}

RecordKey::RecordKey(const SSL* ssl, std::vector<uint8_t> secret, uint64_t count, bool seals)
    : cipher_(EVP_get_cipherbynid(SSL_CIPHER_get_cipher_nid(SSL_get_current_cipher(ssl)))),
      digest_(SSL_CIPHER_get_handshake_digest(SSL_get_current_cipher(ssl))),
      seals_(seals),
      secret_(std::move(secret)),
      count_(count),
      context_(EVP_CIPHER_CTX_new()) {
    check(cipher_ != nullptr && digest_ != nullptr && context_ != nullptr, "no such cipher");
    derive();
}

RecordKey::~RecordKey() {
    OPENSSL_cleanse(secret_.data(), secret_.size());
    OPENSSL_cleanse(iv_.data(), iv_.size());
}

// HKDF-Expand-Label without context (RFC 8446, section 7.1).
std::vector<uint8_t> RecordKey::expand(const std::string& label, size_t count) const {
    const std::string name = "tls13 " + label;
    std::vector<uint8_t> info{static_cast<uint8_t>(count >> 8), static_cast<uint8_t>(count),
                              static_cast<uint8_t>(name.size())};
    info.insert(info.end(), name.begin(), name.end());
    info.push_back(0);
    int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY;
    auto* digest = const_cast<char*>(EVP_MD_get0_name(digest_));
    auto* secret = const_cast<uint8_t*>(secret_.data());
    const OSSL_PARAM settings[] = {
        OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, secret, secret_.size()),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
        OSSL_PARAM_construct_end(),
    };
    EVP_KDF* kdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
    EVP_KDF_CTX* context = kdf == nullptr ? nullptr : EVP_KDF_CTX_new(kdf);
    EVP_KDF_free(kdf);
    std::vector<uint8_t> made(count);
    const bool is_made =
        context != nullptr && EVP_KDF_derive(context, made.data(), made.size(), settings) == 1;
    EVP_KDF_CTX_free(context);
    check(is_made, "HKDF");
    return made;
}

void RecordKey::derive() {
    std::vector<uint8_t> key = expand("key", static_cast<size_t>(EVP_CIPHER_get_key_length(cipher_)));
    std::vector<uint8_t> iv = expand("iv", iv_.size());
    std::copy(iv.begin(), iv.end(), iv_.begin());
    const int is_set = EVP_CipherInit_ex(context_.get(), cipher_, nullptr, key.data(), iv.data(),
                                         seals_ ? 1 : 0);
    OPENSSL_cleanse(key.data(), key.size());
    OPENSSL_cleanse(iv.data(), iv.size());
    check(is_set == 1, "a key");
}

void RecordKey::update() {
    std::vector<uint8_t> next = expand("traffic upd", secret_.size());
    secret_.swap(next);
    OPENSSL_cleanse(next.data(), next.size());
    count_ = 0;
    derive();
}

// Begin a record: its nonce is the iv and its number, its head is authenticated too.
void RecordKey::start(const uint8_t* head) {
    std::array<uint8_t, 12> nonce = iv_;
    for (size_t index = 0; index < 8; ++index) {
        nonce[nonce.size() - 1 - index] ^= static_cast<uint8_t>(count_ >> (8 * index));
    }
    ++count_;
    int done = 0;
    check(EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1 &&
              EVP_CipherUpdate(context_.get(), nullptr, &done, head, record_head_bytes) == 1,
          "a record");
}

void RecordKey::seal(uint8_t* record, Content type, const uint8_t* data, size_t count) {
    const size_t length = count + 1 + record_tag_bytes;
    const uint8_t head[record_head_bytes] = {static_cast<uint8_t>(Content::data), 3, 3,
                                             static_cast<uint8_t>(length >> 8),
                                             static_cast<uint8_t>(length)};
    std::copy(head, head + sizeof head, record);
    start(head);
    EVP_CIPHER_CTX* context = context_.get();
    uint8_t* at = record + record_head_bytes;
    const auto last = static_cast<uint8_t>(type);
    int done = 0;
    check((count == 0 || EVP_CipherUpdate(context, at, &done, data, static_cast<int>(count)) == 1) &&
              EVP_CipherUpdate(context, at + count, &done, &last, 1) == 1 &&
              EVP_CipherFinal_ex(context, at + count + 1, &done) == 1 &&
              EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, record_tag_bytes,
                                  at + count + 1) == 1,
          "sealing");
}

Content RecordKey::open(const uint8_t* record, size_t length, uint8_t* data, size_t& count) {
    start(record);
    EVP_CIPHER_CTX* context = context_.get();
    const uint8_t* at = record + record_head_bytes;
    count = length - record_tag_bytes - 1;
    uint8_t tag[record_tag_bytes];
    std::copy(at + count + 1, at + length, tag);
    uint8_t last = 0;
    int done = 0;
    check((count == 0 || EVP_CipherUpdate(context, data, &done, at, static_cast<int>(count)) == 1) &&
              EVP_CipherUpdate(context, &last, &done, at + count, 1) == 1 &&
              EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, sizeof tag, tag) == 1,
          "opening");
    if (EVP_CipherFinal_ex(context, &last, &done) != 1) {
        throw RecordError(bad_record_mac, "DECRYPTION_FAILED_OR_BAD_RECORD_MAC");
    }
    // Zeros behind the type are padding.
    while (last == 0 && count > 0) last = data[--count];
    if (count > record_bytes) throw RecordError(record_overflow, "DATA_LENGTH_TOO_LONG");
    if (last < static_cast<uint8_t>(Content::alert) || last > static_cast<uint8_t>(Content::data)) {
        throw RecordError(unexpected_message, "UNEXPECTED_MESSAGE");
    }
    return static_cast<Content>(last);
}

}  // namespace potluck

#endif
