// The link that Python hands to the loop (NativeLoop._deliver, ProgressLoop::adopt).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/tls/stream.hpp"

namespace potluck {

// Slots of memory shared with a worker of the same node (transport/link_memory.py, which owns it).
struct LinkMemory {
    uint32_t slot_bytes = 0;
    std::vector<uint8_t*> outgoing;
    std::vector<const uint8_t*> incoming;

    uint32_t num_slots() const { return static_cast<uint32_t>(outgoing.size()); }
};

// A link to `rank`. Its bytes go through `stream`, which does what `Link` does in Python.
struct AdoptedLink {
    uint64_t id = 0;  // names the link when the loop releases it
    int rank = -1;
    std::shared_ptr<Stream> stream;
    LinkMemory memory;  // without slots where there is none
};

}  // namespace potluck
