// The tags of a signed link are the same whether OpenSSL makes the hash or core/tls/ghash.cpp: for
// records of any size, in parts of any size, over changes of the key.
#include <cstdio>

#ifdef POTLUCK_OPENSSL

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "core/tls/record_tags.hpp"

using namespace potluck;

int main() {
    std::mt19937 random(20261123);
    const auto below = [&](size_t bound) { return static_cast<size_t>(random()) % bound; };
    std::vector<uint8_t> data(70000);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
    for (int round = 0; round < 300; ++round) {
        std::vector<uint8_t> key(key_bytes);
        for (uint8_t& byte : key) byte = static_cast<uint8_t>(random());
        RecordTags openssl(key.data(), 3, false), vectors(key.data(), 3, true);
        for (int number = 0; number < 8; ++number) {
            const size_t most[] = {1, 40, 1000, data.size()};
            const size_t count = below(most[number % 4] + 1), begin = below(data.size() - count + 1);
            openssl.begin();
            openssl.add(data.data() + begin, count);
            vectors.begin();
            for (size_t at = 0; at < count;) {
                const size_t part = std::min(count - at, 1 + below(round % 2 ? 600 : 20000));
                vectors.add(data.data() + begin + at, part);
                at += part;
            }
            const Tag tag = vectors.end();
            if (!are_same(openssl.end(), tag.data())) {
                std::fprintf(stderr, "record_tags: %zu bytes have two tags (round %d)\n", count,
                             round);
                return 1;
            }
        }
    }
    std::puts("record_tags: all checks passed");
    return 0;
}

#else

int main() {
    std::puts("record_tags: built without OpenSSL, so there is nothing to check");
    return 0;
}

#endif
