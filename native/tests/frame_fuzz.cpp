// A fuzzer of the code that reads a link: the frame parser, and the connection that cuts a stream
// into frames.
//
//     frame_fuzz [SECONDS [SEED]]      5 minutes by default; prints its seed and its counts
//
// An input starts as a row of frames that potluck would send, and is mutated: bits, bytes, whole
// fields, lengths, order, cuts, pieces of other inputs. Inputs with a new outcome (an error or an
// end not seen before) join the corpus. Run under the sanitizers (make fuzz). What these do not see
// is checked here: only ProtocolError and LinkError are thrown, no frame announces more than its
// kind may have, and a header that is accepted is encoded to the same bytes again.
// With libFuzzer: -DPOTLUCK_LIBFUZZER -fsanitize=fuzzer.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/loop/frame.hpp"
#include "core/loop/connection.hpp"
#include "core/tls/stream.hpp"

using namespace potluck;
using Input = std::vector<uint8_t>;

namespace {

[[noreturn]] void finding(const char* what, const Input& input) {
    std::fprintf(stderr, "frame_fuzz: %s, for these %zu bytes:\n", what, input.size());
    for (const uint8_t byte : input) std::fprintf(stderr, "%02x", byte);
    std::fprintf(stderr, "\n");
    std::abort();
}

// A stream that returns the input in pieces of changing size, and now and then would block.
class Pieces : public Stream {
public:
    Pieces(const uint8_t* data, size_t size, size_t rhythm)
        : data_(data), left_(size), rhythm_(rhythm) {}

    void take_over(std::string) override {}
    int fd() const override { return -1; }
    size_t send(const uint8_t*, size_t count) override { return count; }
    void flush() override {}
    size_t unsent() const override { return 0; }
    bool is_readable() const override { return left_ > 0; }
    bool is_empty() const { return left_ == 0; }

    size_t recv(uint8_t* buffer, size_t count) override {
        ++calls_;
        if (rhythm_ > 0 && calls_ % (rhythm_ + 2) == 0) return 0;
        size_t taken = std::min(count, left_);
        if (rhythm_ > 0) taken = std::min(taken, 1 + calls_ * 7919 % (rhythm_ * 13));
        std::memcpy(buffer, data_, taken);
        data_ += taken;
        left_ -= taken;
        return taken;
    }

private:
    const uint8_t* data_;
    size_t left_;
    size_t rhythm_;
    size_t calls_ = 0;
};

// The outcome of an input as text: the corpus keeps one input for each outcome.
std::string read_header(const Input& input) {
    uint8_t header[frame_bytes] = {};
    if (!input.empty()) std::memcpy(header, input.data(), std::min(frame_bytes, input.size()));
    try {
        const Frame frame = decode(header);
        if (frame.length > bound_of(frame.kind)) finding("a frame above its bound", input);
        uint8_t again[frame_bytes];
        encode(frame, again);
        if (std::memcmp(header, again, frame_bytes) != 0) finding("a header that changes", input);
        return name_of(frame.kind);
    } catch (const ProtocolError& error) {
        return std::string(error.what()).substr(0, 24);
    }
}

std::string read_request(const Input& input) {
    try {
        decode_rts(input.data(), input.size());
        return "request";
    } catch (const ProtocolError& error) {
        return std::string(error.what()).substr(0, 24);
    }
}

std::string read_stream(const Input& input, unsigned how) {
    constexpr uint32_t slot_bytes = 256;
    const bool has_link_memory = how & 1;
    const size_t rhythm = how >> 1 & 7;
    const size_t place = how >> 4 & 3;
    static std::vector<uint8_t> slots(4 * slot_bytes, 0x5a);
    AdoptedLink link;
    link.rank = 1;
    auto pieces = std::make_shared<Pieces>(input.data(), input.size(), rhythm);
    link.stream = pieces;
    if (has_link_memory) {
        link.memory.slot_bytes = slot_bytes;
        for (size_t slot = 0; slot < 2; ++slot) {
            link.memory.outgoing.push_back(slots.data() + slot * slot_bytes);
            link.memory.incoming.push_back(slots.data() + (2 + slot) * slot_bytes);
        }
    }
    Connection connection(std::move(link), std::make_shared<Counters>());
    std::vector<uint8_t> buffer;
    size_t num_frames = 0, seen = 0;
    uint8_t sum = 0;
    const Connection::Route route = [&](Connection&, const Frame& frame) {
        if (frame.length > bound_of(frame.kind)) finding("a payload above its bound", input);
        ++num_frames;
        Sink sink;
        seen = 0;
        // A long payload is taken in parts: with a buffer, most time would go into zeroing
        // megabytes.
        const size_t where = frame.length > 4096 ? 2 : place;
        if (where == 1) {
            buffer.assign(frame.length, 0);  // of exactly this size: the sanitizer finds overflows
            sink.buffer = buffer.data();
        } else if (where == 2) {
            sink.consume = [&](const uint8_t* part, size_t offset, size_t count) {
                if (offset != seen || count > frame_bytes + max_payload) {
                    finding("parts that do not follow each other", input);
                }
                for (size_t i = 0; i < count; ++i) sum = static_cast<uint8_t>(sum + part[i]);
                seen += count;
            };
        }
        const uint32_t length = frame.length;
        sink.complete = [&, length, where](const uint8_t* payload) {
            if (where == 0 && payload != nullptr) {
                for (size_t i = 0; i < length; ++i) sum = static_cast<uint8_t>(sum + payload[i]);
            }
            if (where == 2 && seen != length) finding("a payload with a hole", input);
        };
        return sink;
    };
    std::string end = "end";
    try {
        // The stream would block at most every other time, so this ends.
        for (size_t i = 0; i < 2 * input.size() + 16 && !pieces->is_empty(); ++i)
            connection.read(route);
        while (!connection.control.empty()) {
            if (connection.control.front().sent) connection.control.front().sent();
            connection.control.pop_front();
        }
    } catch (const ProtocolError& error) {
        end = std::string(error.what()).substr(0, 24);
    } catch (const LinkError& error) {
        end = std::string(error.what()).substr(0, 24);
    }
    return end + std::to_string(how & 1) + "." + std::to_string(std::min<size_t>(num_frames, 4));
}

std::vector<std::string> run(const Input& input, unsigned how) {
    return {read_header(input), read_request(input), read_stream(input, how)};
}

#ifndef POTLUCK_LIBFUZZER

class Mutator {
public:
    explicit Mutator(uint64_t seed) : random_(seed) {}

    uint64_t below(uint64_t bound) { return bound ? random_() % bound : 0; }

    // Frames that potluck might send, with their payloads.
    Input fresh() {
        Input input;
        for (uint64_t left = 1 + below(4); left > 0; --left) {
            Frame frame;
            frame.kind = static_cast<Kind>(1 + below(13));
            frame.epoch = static_cast<uint32_t>(below(3));
            frame.channel = static_cast<uint32_t>(below(2));
            frame.sequence = below(5);
            frame.chunk = static_cast<uint32_t>(below(4));
            frame.segment = static_cast<uint32_t>(below(4));
            frame.fingerprint = random_();
            frame.source = static_cast<uint16_t>(below(4));
            frame.dtype = static_cast<uint8_t>(below(16));
            frame.tag = static_cast<int32_t>(below(3));
            frame.length = static_cast<uint32_t>(std::min<uint64_t>(bound_of(frame.kind), below(400)));
            const bool may_share = frame.kind == Kind::data || frame.kind == Kind::piece;
            if (may_share && below(3) == 0) frame.flags = in_link_memory;
            if (frame.kind == Kind::rts) {
                const std::vector<uint8_t> body = encode_rts(random_() >> below(64));
                frame.length = static_cast<uint32_t>(body.size());
                add_header(input, frame);
                add_payload(input, body);
                continue;
            }
            add_header(input, frame);
            if (frame.flags & in_link_memory) continue;
            Input payload(frame.length);
            for (uint8_t& byte : payload) byte = static_cast<uint8_t>(random_());
            add_payload(input, payload);
        }
        if (below(8) == 0) return encode_rts(random_() >> below(64));
        return input;
    }

    void change(Input& input, const std::vector<Input>& corpus) {
        for (uint64_t left = 1 + below(5); left > 0; --left) change_once(input, corpus);
    }

private:
    void change_once(Input& input, const std::vector<Input>& corpus) {
        static const uint64_t numbers[] = {0, 1, 2, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff,
                                           eager_bytes, eager_bytes + 1, max_control, max_control + 1,
                                           max_payload, max_payload + 1, 0x7fffffff, 0x80000000,
                                           0xffffffff, 0x7fffffffffffffff, 0xffffffffffffffff};
        const size_t size = input.size();
        const size_t at = below(size);
        switch (below(9)) {
            case 0:
                if (size) input[at] ^= static_cast<uint8_t>(1u << below(8));
                break;
            case 1:
                if (size) input[at] = static_cast<uint8_t>(random_());
                break;
            case 2: {  // an integer at a bound, of any width, at any place
                const uint64_t number = numbers[below(std::size(numbers))];
                const size_t width = std::min<size_t>(size_t{1} << below(4), size - at);
                if (width == 0) break;
                std::memcpy(input.data() + at, &number, width);
                break;
            }
            case 3: {  // the same in a field of the first header
                static const size_t fields[][2] = {{0, 2}, {2, 1}, {3, 1}, {4, 4}, {8, 4}, {12, 4},
                                                   {16, 8}, {24, 4}, {28, 4}, {32, 8}, {40, 2},
                                                   {42, 1}, {43, 1}, {44, 4}};
                const auto& field = fields[below(std::size(fields))];
                if (size < frame_bytes) break;
                const uint64_t number = numbers[below(std::size(numbers))];
                std::memcpy(input.data() + field[0], &number, field[1]);
                break;
            }
            case 4: input.resize(at); break;
            case 5: {
                const size_t count = std::min<size_t>(below(64), size - at);
                input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                            input.begin() + static_cast<std::ptrdiff_t>(at + count));
                break;
            }
            case 6: {
                const Input piece(1 + below(64), static_cast<uint8_t>(random_()));
                input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), piece.begin(), piece.end());
                break;
            }
            case 7: {  // the end repeated
                const Input copy(input.begin() + static_cast<std::ptrdiff_t>(at), input.end());
                input.insert(input.end(), copy.begin(), copy.end());
                break;
            }
            default: {  // another input behind the first part of this one
                if (corpus.empty()) break;
                const Input& other = corpus[below(corpus.size())];
                input.resize(at);
                input.insert(input.end(), other.begin(), other.end());
            }
        }
        if (input.size() > 4096) input.resize(4096);
    }

    static void add_payload(Input& input, const std::vector<uint8_t>& payload) {
        input.insert(input.end(), payload.begin(), payload.end());
    }

    static void add_header(Input& input, const Frame& frame) {
        uint8_t header[frame_bytes];
        encode(frame, header);
        input.insert(input.end(), header, header + frame_bytes);
    }

    std::mt19937_64 random_;
};

int drive(double seconds, uint64_t seed) {
    std::printf("frame_fuzz: seed %llu, %.0f s\n", static_cast<unsigned long long>(seed), seconds);
    std::fflush(stdout);
    Mutator mutator(seed);
    std::vector<Input> corpus;
    std::set<std::string> reached;
    const auto start = std::chrono::steady_clock::now();
    uint64_t count = 0;
    const auto passed = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    for (double now = 0; now < seconds; now = passed()) {
        for (int i = 0; i < 256; ++i, ++count) {
            const auto how = static_cast<unsigned>(mutator.below(64));
            const bool is_fresh = corpus.empty() || mutator.below(4) == 0;
            Input input = is_fresh ? mutator.fresh() : corpus[mutator.below(corpus.size())];
            if (mutator.below(16)) mutator.change(input, corpus);
            bool is_new = false;
            for (const std::string& place : run(input, how)) is_new |= reached.insert(place).second;
            if (is_new && corpus.size() < 4096) corpus.push_back(input);
        }
    }
    std::printf("frame_fuzz: no finding in %llu inputs; %zu kinds of outcome\n",
                static_cast<unsigned long long>(count), reached.size());
    for (const char* kind : {"DATA", "EAGER", "RTS", "ABORT", "BEGUN", "request"}) {
        if (reached.count(kind) == 0) {
            std::fprintf(stderr, "frame_fuzz: never came as far as %s: the fuzzer is broken\n", kind);
            return 1;
        }
    }
    return 0;
}

#endif

}  // namespace

#ifdef POTLUCK_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    run(Input(data + 1, data + size), data[0]);
    return 0;
}

#else

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 300;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
    return drive(seconds, seed);
}

#endif
