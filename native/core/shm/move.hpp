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
// So there is one synchronisation per block, not two or three.
//
// Broadcast: only the root has data, so the slots of the other ranks would stay empty. The root
// writes into the slots of all ranks in turn. It can then be many blocks ahead of its readers, and
// ranks that share a core copy many blocks each time that they get the core, instead of one.
//
// Reductions: contributions are combined in the order of the ranks, whichever rank combines them.
// So the result has the same bits on every rank, and for both ways of reducing.
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
// In the order in which fingerprints count them: OPERATIONS in src/potluck/engine/fingerprint.py.
constexpr const char* KIND_NAMES[NUM_KINDS] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "scatter",    "gather",         "all_to_all", "barrier",
};

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
    bool gives() const;      // whether this rank writes into a slot
    bool listens() const;    // whether this rank reads from slots
    Need free_slot() const;  // what to wait for before the slot of block `iteration_` is written
    Need takes() const;      // what to wait for before block `iteration_ - 1` is read
    Span block(int index) const;
    Span slice(Span block, int of_rank) const;
    void give(int index);        // stage 1: copy in
    void take(int index);        // stage 2: combine, or copy out
    void bring_home(int index);  // stage 3: copy out what other ranks have combined
    bool is_over_own_part() const;
    bool is_only_reader() const;
    // `copy_slice`: from the user's array into a slot. `copy_own`: from the user's array into the
    // result, past the caches if the result is large. `copy_out`: from another rank's slot into the
    // result, claimed if the slot has no other reader.
    void copy_slice(char* to, const char* from, std::size_t length) const;
    void copy_own(char* to, const char* from, std::size_t length) const;
    void copy_out(char* to, char* from, std::size_t length, bool is_claimed) const;
    // Combine all ranks' elements at `offset` of their slots into `total`, and copy the outcome to
    // `result` if there is one. This rank's own elements come from `own` if that is given. With two
    // ranks the other rank's elements are overwritten.
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
