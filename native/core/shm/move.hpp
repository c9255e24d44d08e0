// A collective call through shared memory, as a state machine that never blocks.
//
// The data goes a block at a time. In its iteration `i` a rank
//
//     copies block i into its slot                      (what the others need of it)
//     and, once all have completed the iteration before,
//     consumes block i - 1 from the others' slots       (copies it out, or combines it)
//     [all_reduce and reduce of large data: consuming is combining the own slice, into the slot,
//      and a third stage copies the others' slices of block i - 2 out]
//     and counts one tick.
//
// So there is one synchronisation per block, not two or three. The root of a broadcast, whose slots
// alone would be in use, goes on into all others': it may be far ahead, and ranks that share a core
// take few, long turns. Contributions are always combined
// in the order of the ranks, by whoever combines them: results are the same bits on every rank
// and for both ways of reducing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/shm/channel.hpp"
#include "core/shm/combine.hpp"

namespace potluck::shm {

enum class Kind : std::uint8_t {
    ALL_REDUCE = 0,
    REDUCE_SCATTER,
    ALL_GATHER,
    BROADCAST,
    REDUCE,
    SCATTER,
    GATHER,
    ALL_TO_ALL,
    BARRIER,
};
constexpr int NUM_KINDS = 9;

// What one rank asks for. `count` is in elements: of the whole array for all_reduce, broadcast and
// reduce, of one rank's part for the others.
struct Call {
    Kind kind = Kind::BARRIER;
    Combination combination;
    int root = 0;
    const char* source = nullptr;
    char* result = nullptr;
    std::size_t count = 0;
    std::size_t itemsize = 1;
    std::uint64_t number = 0;
    std::uint64_t fingerprint = 0;
};

class Movement {
public:
    explicit Movement(const Call& call) : call_(call) {}

    // Go on as far as possible: DONE, PENDING (`need` must come first) or DESYNC.
    Outcome step(Channel& channel);

    bool has_begun() const { return channel_ != nullptr; }
    const Call& call() const { return call_; }
    const Need& need() const { return need_; }
    // The tick at which this call began here.
    std::uint32_t base() const { return base_; }

private:
    struct Span {
        std::size_t at;
        std::size_t length;
    };

    void begin(Channel& channel);
    bool gives() const;     // writes into its slot
    Need free_slot() const;  // what must be before it writes block `iteration_`
    Need takes() const;     // whom it must have heard of before it reads
    bool listens() const;   // reads at all
    Span block(int index) const;
    Span slice(Span block, int of_rank) const;
    void give(int index);
    void take(int index);
    void bring_home(int index);
    bool is_over_own_part() const;
    bool is_only_reader() const;
    // Elements from memory of this rank, into a slot; into the result, past the caches if that is
    // large; from another's slot into the result, claimed if the slot has no other reader.
    void copy_slice(char* to, const char* from, std::size_t length) const;
    void copy_own(char* to, const char* from, std::size_t length) const;
    void copy_out(char* to, char* from, std::size_t length, bool is_claimed) const;
    // All ranks' elements at `offset` of their slots into `total`, and `result` if there is one;
    // this rank's own ones from `own` if that is given. Of two ranks, the other's are written over.
    void combine(int index, std::size_t offset, std::size_t length, const char* own, char* total,
                 char* result) const;
    char* slot(int of_rank, int index) const;
    char* total_slot(int owner, int index) const;
    char* common_slot(int index) const;
    int num_common_slots() const;

    Call call_;
    Channel* channel_ = nullptr;
    Need need_;
    std::uint32_t base_ = 0;
    std::size_t block_ = 0;  // elements
    int num_blocks_ = 0;
    bool is_large_ = false;  // results together are more than caches hold
    int depth_ = 1;          // 2: slices are combined by their owners and copied out by the others
    int iteration_ = 0;
    int stage_ = 0;
    bool has_compared_ = false;
};

}  // namespace potluck::shm
