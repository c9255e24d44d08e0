// A collective call through shared memory, as a state machine that never blocks: a software
// pipeline of two or three stages over the blocks of the data.
//
// In iteration `i` a rank
//
//     copies block i into its slot                            (copy_in: what the others need of it)
//     and, once all ranks have completed iteration i - 1,
//     consumes block i - 1 from the others' slots             (consume: combines or copies out)
//     [large all_reduce and reduce: `consume` combines only this rank's slice of the block, into a
//      slot, and gather_sums copies the other ranks' slices of block i - 2 out]
//     and counts one tick.
//
// So there is one synchronisation per block, not two or three. The third stage makes a large
// all_reduce a reduce-scatter and an all-gather (Rabenseifner's algorithm; see
// engine/shm/channel.py for the size from which that pays).
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
// Numbered as in fingerprints: OPERATIONS in src/potluck/_core/engine/fingerprint.py.
constexpr const char* KIND_NAMES[NUM_KINDS] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "scatter",    "gather",         "all_to_all", "barrier",
};

// The arguments of one rank's call. `count` is in elements: of the whole array for all_reduce,
// broadcast and reduce, of one rank's part for the others. `source` and `result` are the user's
// arrays, read and written until the call has ended.
struct Call {
    Kind kind = Kind::BARRIER;
    Combination combination;
    int root = 0;
    const char* source = nullptr;
    char* result = nullptr;
    std::size_t count = 0;
    std::size_t itemsize = 1;
    std::uint64_t sequence = 0;
    std::uint64_t fingerprint = 0;
};

class RunningCall {
public:
    explicit RunningCall(const Call& call) : call_(call) {}

    // Go on as far as possible without waiting: DONE, PENDING (`condition` must be met before the
    // next step) or DESYNC.
    Outcome step(Channel& channel);

    bool has_begun() const { return channel_ != nullptr; }
    const Call& call() const { return call_; }
    const Condition& condition() const { return condition_; }
    // The tick at which this call began here.
    std::uint32_t base() const { return base_; }

private:
    struct Span {
        std::size_t at;
        std::size_t length;
    };

    void begin(Channel& channel);
    bool writes_slot() const;  // whether this rank writes into a slot
    bool reads_slots() const;  // whether this rank reads from slots
    Condition when_slot_is_free() const;   // before the slot of block `iteration_` is written
    Condition when_data_is_ready() const;  // before block `iteration_ - 1` is read
    Span block(int index) const;
    Span slice(Span block, int of_rank) const;
    void copy_in(int index);      // stage 1
    void consume(int index);      // stage 2: combine, or copy out
    void gather_sums(int index);  // stage 3: copy out what other ranks have combined
    bool overwrites_own_part() const;
    bool is_only_reader() const;
    // `copy_slice`: from the user's array into a slot. `copy_own`: from the user's array into the
    // result, past the caches if the result is large. `copy_out`: from another rank's slot into the
    // result, claimed if the slot has no other reader.
    void copy_slice(char* to, const char* from, std::size_t length) const;
    void copy_own(char* to, const char* from, std::size_t length) const;
    void copy_out(char* to, char* from, std::size_t length, bool is_claimed) const;
    // Combine all ranks' elements at `offset` of their slots into `total`, and copy the sum to
    // `result` if that is given. This rank's own elements are read from `own` if that is given,
    // else from its slot. With two ranks the other rank's elements are overwritten.
    void combine(int index, std::size_t offset, std::size_t length, const char* own, char* total,
                 char* result) const;
    char* slot(int of_rank, int index) const;
    char* sum_slot(int owner, int index) const;
    char* broadcast_slot(int index) const;
    int num_broadcast_slots() const;

    Call call_;
    Channel* channel_ = nullptr;
    Condition condition_;
    std::uint32_t base_ = 0;
    std::size_t block_ = 0;  // elements
    int num_blocks_ = 0;
    bool bypasses_cache_ = false;  // the results of all ranks together are more than caches hold
    int depth_ = 1;  // 2: each rank combines a slice, which the others copy out (the third stage)
    int iteration_ = 0;
    int stage_ = 0;  // within an iteration, where `step` goes on
    bool has_compared_ = false;
};

}  // namespace potluck::shm
