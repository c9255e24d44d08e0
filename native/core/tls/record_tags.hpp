// The tags of a signed link: AES-256-GMAC under a key for each direction, with the record's number as
// nonce. The twin of transport/record_tags.py, where the choices and their bounds are explained.
#pragma once

#ifdef POTLUCK_OPENSSL

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/tls/ghash.hpp"

namespace potluck {

constexpr size_t key_bytes = 32;
constexpr size_t tag_bytes = 16;

using Tag = std::array<uint8_t, tag_bytes>;

// One direction's key, and the number of its next record. The key is overwritten at the end. By
// OpenSSL; where the processor has wider vectors than OpenSSL 3.0 uses, the hash is `Ghash`'s, and
// OpenSSL's the cipher.
class RecordTags {
public:
    RecordTags(const uint8_t* key, uint64_t records_per_key, bool use_vectors = true);
    ~RecordTags();
    RecordTags(const RecordTags&) = delete;
    RecordTags& operator=(const RecordTags&) = delete;

    // The tag of the next record: `begin`, its bytes by `add`, `end`.
    void begin();
    void add(const uint8_t* data, size_t count);
    Tag end();

private:
    void set_key();
    void step();
    void add_part(const uint8_t* data, size_t count);

    struct Free {
        void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
    };
    std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
#ifdef POTLUCK_GHASH
    void encrypt(const Ghash::Block& block, Ghash::Block& result);

    Ghash hash_;
    Ghash::Block mask_{};  // what the hash is combined with: the encrypted nonce
    bool uses_vectors_;
#endif
    std::array<uint8_t, key_bytes> key_;
    uint64_t records_per_key_;
    uint64_t number_ = 0;
};

// Whether they are the same, in a time that does not depend on where they differ.
bool are_same(const Tag& mine, const uint8_t* theirs);

}  // namespace potluck

#endif
