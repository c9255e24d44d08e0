// The tags of a signed link: AES-256-GMAC under a key for each direction, with the record's number as
// nonce. The twin of transport/record_tags.py, where the choices and their bounds are explained.
#pragma once

#ifdef POTLUCK_OPENSSL

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace potluck {

constexpr size_t key_bytes = 32;
constexpr size_t tag_bytes = 16;

using Tag = std::array<uint8_t, tag_bytes>;

// One direction's key, and the number of its next record. The key is overwritten at the end.
class RecordTags {
public:
    RecordTags(const uint8_t* key, uint64_t records_per_key);
    ~RecordTags();
    RecordTags(const RecordTags&) = delete;
    RecordTags& operator=(const RecordTags&) = delete;

    // The tag of the next record: `begin`, its bytes by `add`, `end`.
    void begin();
    void add(const uint8_t* data, size_t count);
    Tag end();

private:
    void step();

    struct Free {
        void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
    };
    std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
    std::array<uint8_t, key_bytes> key_;
    uint64_t records_per_key_;
    uint64_t number_ = 0;
};

// Whether they are the same, in a time that does not depend on where they differ.
bool are_same(const Tag& mine, const uint8_t* theirs);

}  // namespace potluck

#endif
