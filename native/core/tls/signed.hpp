// Clear text whose every byte is authenticated, over a connection whose greeting went under TLS: the
// `signed` mode. The twin of transport/signed.py, where the record is described.
//
// Sent data are not copied: the kernel takes them from where they lie. Received data wait in a buffer
// of two records, which stays in the caches, until their tag was found right.
#pragma once

#ifdef POTLUCK_OPENSSL

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/tls/record_tags.hpp"
#include "core/tls/stream.hpp"

namespace potluck {

constexpr size_t signed_length_bytes = 4;
constexpr size_t signed_overhead = signed_length_bytes + tag_bytes;
// The most data of one record: a part of the loop's buffer, behind the header of a frame.
constexpr size_t signed_record_bytes = 64 * 1024 + 64;

class SignedStream : public Stream {
public:
    // Over a connected non-blocking socket that the caller keeps open. The keys have `key_bytes`.
    SignedStream(int fd, const uint8_t* sends, const uint8_t* receives, uint64_t records_per_key,
                 std::string peer);

    void take_over(std::string peer) override { peer_ = std::move(peer); }
    int fd() const override { return fd_; }
    size_t send(const uint8_t* data, size_t count) override;
    size_t send(const Piece* pieces, size_t num) override;
    // A record's last bytes count as taken once its tag has left, so nothing waits here.
    void flush() override {}
    size_t unsent() const override { return 0; }
    size_t recv(uint8_t* buffer, size_t count) override;
    bool is_readable() const override;

private:
    size_t taken() const { return sent_ > signed_overhead ? sent_ - signed_overhead : 0; }
    void begin(const Piece* pieces, size_t num, size_t skip, size_t count);
    bool push(const Piece* pieces, size_t num, size_t skip);
    bool next_record();
    std::optional<size_t> length_of_next();
    bool fill();
    void compact();
    [[noreturn]] void broke(const std::string& reason);
    [[noreturn]] void failed(std::string& why, int error, const char* doing);

    int fd_;
    std::string peer_;
    std::optional<RecordTags> sends_, receives_;  // none after a wrong tag
    std::string end_;       // why no more will be received,
    std::string send_end_;  // and why no more can be sent

    // The record that is being sent, if `size_` is not 0. Its data are the first bytes that the
    // caller offers; `sent_` of its bytes, head and tag included, have left.
    std::array<uint8_t, signed_length_bytes> head_{};
    Tag tag_{};
    size_t size_ = 0;
    size_t sent_ = 0;

    // What was received: from `at_` to `end_of_data_`, data of a record whose tag was right; from
    // `next_` to `filled_`, what follows that record.
    std::vector<uint8_t> incoming_;
    size_t at_ = 0, end_of_data_ = 0, next_ = 0, filled_ = 0;
    bool is_starved_ = true;   // the last `recv` took all that could be taken
    bool is_drained_ = false;  // the last recv() emptied the kernel's buffer
};

}  // namespace potluck

#endif
