#include "core/shm/running_call.hpp"

#include <algorithm>
#include <cstring>

#include "core/kernels/cpu.hpp"
#include "core/shm/copy.hpp"

namespace potluck::shm {

namespace {

// Bytes that are claimed and combined at a time (loop tiling): few enough that a claimed line is
// still in the L1 cache when the kernel reads it.
constexpr std::size_t TILE_BYTES = 16 * 1024;
constexpr std::size_t MIN_TILE_BYTES = 2 * 1024;
// For how many rounds a slot is in use: it is written in one round and combined in the next, and in
// a reduction by slices the sums in it are copied out in the round after that. So a slot written in
// round `r` is free once every rank's tick is `r + 3`.
constexpr std::uint32_t MAX_ROUNDS_IN_USE = 3;

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

}  // namespace

Outcome RunningCall::step(Channel& channel) {
    if (channel_ == nullptr) {
        channel_ = &channel;
        begin(channel);
    }
    for (; iteration_ < num_blocks_ + depth_; ++iteration_) {
        if (stage_ == 0) {
            if (iteration_ < num_blocks_ && writes_slot()) {
                condition_ = when_slot_is_free();
                if (!channel.is_met(condition_)) return Outcome::PENDING;
                copy_in(iteration_);
            }
            stage_ = 1;
        }
        if (stage_ == 1) {
            if (iteration_ > 0 && reads_slots()) {
                condition_ = when_data_is_ready();
                if (!channel.is_met(condition_)) return Outcome::PENDING;
                if (!has_compared_) {
                    if (channel.has_mismatch(condition_.peer, call_.fingerprint)) {
                        return Outcome::DESYNC;
                    }
                    has_compared_ = true;
                }
                if (iteration_ <= num_blocks_) consume(iteration_ - 1);
                if (depth_ == 2 && iteration_ > 1) gather_sums(iteration_ - 2);
            }
            stage_ = 2;
        }
        // The fingerprint lies in the cache line of the tick, which all waiting ranks poll. Stored
        // right before the tick, it costs no second transfer of that line.
        if (iteration_ == 0) channel.publish(call_.fingerprint);
        // No tick after the last iteration: no rank waits for it. The slots that were read last
        // are known to be free by the ticks of the next call (when_slot_is_free).
        if (iteration_ + 1 < num_blocks_ + depth_) channel.arrive();
        stage_ = 0;
    }
    return Outcome::DONE;
}

void RunningCall::begin(Channel& channel) {
    base_ = channel.tick();
    channel.sequence = call_.sequence;
    const Shape& shape = channel.shape;
    const auto world = static_cast<std::size_t>(shape.world);
    const std::size_t bytes = call_.count * call_.itemsize;
    std::size_t max_count = shape.slot_bytes / call_.itemsize;
    std::size_t unit = std::max<std::size_t>(1, LINE / call_.itemsize);
    switch (call_.kind) {
        case Kind::ALL_REDUCE:
        case Kind::REDUCE:
            depth_ = bytes <= shape.small_bytes ? 1 : 2;
            if (depth_ == 2) unit *= world;
            break;
        case Kind::REDUCE_SCATTER:
        case Kind::ALL_TO_ALL:
        case Kind::SCATTER:
            max_count /= world;
            break;
        default:
            break;
    }
    max_count = max_count / unit * unit;
    // Large results are stored past the caches, or they would push out the slots. Not those of a
    // reduction, unless ranks share cores: the core has just read the lines that it overwrites.
    const bool collects = call_.kind == Kind::ALL_GATHER || call_.kind == Kind::ALL_TO_ALL;
    const bool reduces = call_.kind == Kind::ALL_REDUCE || call_.kind == Kind::REDUCE;
    const std::size_t result_bytes = bytes * world * (collects ? world : 1);
    bypasses_cache_ = result_bytes > cpu().last_cache / (reduces ? 1 : 4) &&
                      (!reduces || channel.shares_cores());
    // Blocks of equal length: a short last block would cost a whole round too. `int` is enough for
    // their number: even a 64th of a slot is about 1 KiB, and 2^31 of those are 2 TiB.
    const std::size_t num_blocks = (call_.count + max_count - 1) / max_count;
    num_blocks_ = static_cast<int>(std::max<std::size_t>(1, num_blocks));
    const auto blocks = static_cast<std::size_t>(num_blocks_);
    block_ = std::min(max_count, round_up((call_.count + blocks - 1) / blocks, unit));
}

bool RunningCall::writes_slot() const {
    const bool is_root = channel_->rank == call_.root;
    switch (call_.kind) {
        case Kind::BROADCAST:
        case Kind::SCATTER:
            return is_root;
        case Kind::GATHER:
            return !is_root;
        default:
            return true;
    }
}

bool RunningCall::reads_slots() const {
    const bool is_root = channel_->rank == call_.root;
    switch (call_.kind) {
        case Kind::BROADCAST:
        case Kind::SCATTER:
            return !is_root;
        case Kind::GATHER:
            return is_root;
        case Kind::REDUCE:
            return is_root || depth_ == 2;
        default:
            return true;
    }
}

Condition RunningCall::when_slot_is_free() const {
    const auto index = static_cast<std::uint32_t>(iteration_);
    const auto slots = static_cast<std::uint32_t>(channel_->shape.num_slots);
    // The slot was last written `slots` rounds ago, by an earlier call, which may have been of
    // another kind: it is free MAX_ROUNDS_IN_USE rounds after that. But never wait for more than
    // the first tick of this call: a rank that has ticked in it has ended the calls before, so all
    // their slots are free.
    if (index < slots) return {ALL, base_ + std::min(index + MAX_ROUNDS_IN_USE, slots + 1) - slots};
    if (call_.kind != Kind::BROADCAST) {
        // Block `index - slots` of this call lies there. The last stage that uses it is `depth_`
        // iterations later, and an iteration ends with a tick.
        return {ALL, base_ + index - slots + static_cast<std::uint32_t>(depth_) + 1};
    }
    const auto ring = static_cast<std::uint32_t>(num_broadcast_slots());
    // Slots of other ranks: their owners, and those that read from them, have finished the calls
    // before once they have ticked in this call.
    if (index < ring) return {ALL, base_ + 1};
    // A full ring: sleep until half of it is free, not until one slot is.
    return {ALL, base_ + index - ring + 2, ring / 2 - 1};
}

Condition RunningCall::when_data_is_ready() const {
    const std::uint32_t round = base_ + static_cast<std::uint32_t>(iteration_);
    if (call_.kind == Kind::SCATTER) return {call_.root, round};
    if (call_.kind != Kind::BROADCAST) return {ALL, round};
    // A reader that sleeps is woken once half of the ring is full, the root once half of it is
    // free. The root and a reader can't both sleep (deadlock): the two `ahead` together are less
    // than the number of slots, so one of the two conditions always holds.
    const int ahead = std::min(num_broadcast_slots() / 2 - 1, num_blocks_ - iteration_);
    return {call_.root, round, static_cast<std::uint32_t>(ahead)};
}

RunningCall::Span RunningCall::block(int index) const {
    const std::size_t at = std::min(call_.count, static_cast<std::size_t>(index) * block_);
    return {at, std::min(block_, call_.count - at)};
}

// The part of `block` that `of_rank` combines, relative to the block.
RunningCall::Span RunningCall::slice(Span block, int of_rank) const {
    const auto world = static_cast<std::size_t>(channel_->shape.world);
    const std::size_t unit = std::max<std::size_t>(1, LINE / call_.itemsize);
    const std::size_t each = round_up((block.length + world - 1) / world, unit);
    const std::size_t at = std::min(block.length, static_cast<std::size_t>(of_rank) * each);
    return {at, std::min(each, block.length - at)};
}

char* RunningCall::slot(int of_rank, int index) const {
    return channel_->slot(of_rank, base_ + static_cast<std::uint32_t>(index));
}

// Where the sum of `owner`'s slice of a block lies: in the owner's slot. With two ranks it lies in
// the other rank's slot, over that rank's contribution: the owner has just read those lines, and
// the other rank reads the sum next and writes the slot again, so each line goes back to its next
// writer in one transfer.
char* RunningCall::sum_slot(int owner, int index) const {
    return slot(channel_->shape.world == 2 ? 1 - owner : owner, index);
}

// Where block `index` of a broadcast lies: in the root's slots, then in those of the ranks after
// it.
char* RunningCall::broadcast_slot(int index) const {
    return slot((call_.root + index / channel_->shape.num_slots) % channel_->shape.world, index);
}

int RunningCall::num_broadcast_slots() const {
    return channel_->shape.num_slots * channel_->shape.world;
}

// Whether the result is this rank's own part of the source (reduce_scatter in place). With more
// than two ranks the kernel writes the result before it has read all sources, so this rank's part
// must be read from the slot, as the other parts are.
bool RunningCall::overwrites_own_part() const {
    const auto me = static_cast<std::size_t>(channel_->rank);
    return call_.kind == Kind::REDUCE_SCATTER &&
           call_.result == call_.source + me * call_.count * call_.itemsize;
}

// Whether this rank is the only reader of the cache lines that it reads from other ranks' slots, so
// that it may claim them (copy.hpp). With two ranks it always is. With more it is where each rank
// reads a slice or a part of its own: in a large all-reduce, an all-to-all or a scatter. In an
// all-gather, a broadcast or a small all-reduce all ranks read the same lines at the same time, and
// claims would pull the lines from one reader to the next.
bool RunningCall::is_only_reader() const {
    switch (call_.kind) {
        case Kind::ALL_REDUCE:
            return depth_ == 2 || channel_->shape.world == 2;
        case Kind::ALL_GATHER:
        case Kind::BROADCAST:
            return channel_->shape.world == 2;
        default:
            return true;
    }
}

void RunningCall::copy_slice(char* to, const char* from, std::size_t length) const {
    if (length != 0 && to != from) std::memcpy(to, from, length * call_.itemsize);
}

void RunningCall::copy_own(char* to, const char* from, std::size_t length) const {
    if (bypasses_cache_ && to != from && length != 0) {
        copy_nontemporal<false>(to, from, length * call_.itemsize);
    } else {
        copy_slice(to, from, length);
    }
}

void RunningCall::copy_out(char* to, char* from, std::size_t length, bool is_claimed) const {
    if (length == 0) return;
    if (!is_claimed) copy_own(to, from, length);
    else if (bypasses_cache_) copy_nontemporal<true>(to, from, length * call_.itemsize);
    else copy_claimed(to, from, length * call_.itemsize);
}

void RunningCall::combine(int index, std::size_t offset, std::size_t length, const char* own,
                       char* total, char* result) const {
    const int rank = channel_->rank, world = channel_->shape.world;
    const std::size_t size = call_.itemsize;
    // With two ranks the claim costs no pass of its own: the sum, or a copy of it, is stored over
    // the other rank's part. This core then has those lines Modified, and the other rank, which
    // uses them next, gets them in one transfer.
    char* const others = world == 2 ? slot(1 - rank, index) + offset : nullptr;
    if (result == nullptr && total != others) result = others;
    const bool is_claimed = world > 2 && is_only_reader();
    const std::size_t share = TILE_BYTES / static_cast<std::size_t>(world - 1) / LINE * LINE;
    const std::size_t tile = std::max(MIN_TILE_BYTES, share) / size;
    const void* sources[MAX_WORLD];
    for (std::size_t done = 0; done < length; done += tile) {
        const std::size_t some = std::min(tile, length - done), at = done * size;
        for (int other = 0; other < world; ++other) {
            char* theirs = slot(other, index) + offset + at;
            // Claimed just before the kernel reads them: the lines are transferred once, as
            // Modified, and are then read from the L1 cache.
            if (is_claimed && other != rank) claim(theirs, some * size);
            sources[other] = other == rank && own != nullptr ? own + at : theirs;
        }
        combine_all(call_.combination, total + at, sources, world, some,
                    result != nullptr ? result + at : nullptr);
    }
}

void RunningCall::copy_in(int index) {
    const int rank = channel_->rank, world = channel_->shape.world;
    const std::size_t size = call_.itemsize;
    const Span span = block(index);
    char* mine = call_.kind == Kind::BROADCAST ? broadcast_slot(index) : slot(rank, index);
    switch (call_.kind) {
        case Kind::BARRIER:
            break;
        case Kind::ALL_REDUCE:
        case Kind::REDUCE:
            if (depth_ == 1) {
                copy_slice(mine, call_.source + span.at * size, span.length);
                break;
            }
            for (int other = 0; other < world; ++other) {
                if (other == rank) continue;  // combined straight from the user's array
                const Span part = slice(span, other);
                copy_slice(mine + part.at * size, call_.source + (span.at + part.at) * size,
                           part.length);
            }
            break;
        case Kind::REDUCE_SCATTER:
        case Kind::ALL_TO_ALL:
        case Kind::SCATTER:
            for (int other = 0; other < world; ++other) {
                const auto part = static_cast<std::size_t>(other);
                if (other == rank && !overwrites_own_part()) continue;  // `consume` reads the array
                copy_slice(mine + part * block_ * size,
                           call_.source + (part * call_.count + span.at) * size, span.length);
            }
            break;
        case Kind::ALL_GATHER:
        case Kind::GATHER:
        case Kind::BROADCAST:
            copy_slice(mine, call_.source + span.at * size, span.length);
            break;
    }
    // The root of a scatter never consumes a block, so it copies its own part here.
    if (call_.kind == Kind::SCATTER) {
        copy_slice(call_.result + span.at * size,
                   call_.source + (static_cast<std::size_t>(rank) * call_.count + span.at) * size,
                   span.length);
    }
}

void RunningCall::consume(int index) {
    const int rank = channel_->rank, world = channel_->shape.world;
    const auto me = static_cast<std::size_t>(rank);
    const std::size_t size = call_.itemsize;
    const Span span = block(index);
    char* const result = call_.result + span.at * size;
    switch (call_.kind) {
        case Kind::BARRIER:
            break;
        case Kind::ALL_REDUCE:
        case Kind::REDUCE: {
            const char* const source = call_.source + span.at * size;
            if (depth_ == 1) {
                // With more than two ranks the kernel writes the result before it has read all
                // sources. In an in-place call the result is this rank's source, so that is read
                // from the slot.
                combine(index, 0, span.length, world == 2 ? source : nullptr, result, nullptr);
                break;
            }
            const Span part = slice(span, rank);
            const std::size_t offset = part.at * size;
            const bool keeps = call_.kind == Kind::ALL_REDUCE || rank == call_.root;
            combine(index, offset, part.length, source + offset, sum_slot(rank, index) + offset,
                    keeps ? result + offset : nullptr);
            break;
        }
        case Kind::REDUCE_SCATTER:
            combine(index, me * block_ * size, span.length,
                    overwrites_own_part() ? nullptr
                                       : call_.source + (me * call_.count + span.at) * size,
                    result, nullptr);
            break;
        case Kind::ALL_TO_ALL:
            for (int i = 0; i < world; ++i) {
                const int other = (rank + i) % world;
                const auto part = (static_cast<std::size_t>(other) * call_.count + span.at) * size;
                if (other == rank) copy_own(call_.result + part, call_.source + part, span.length);
                else copy_out(call_.result + part, slot(other, index) + me * block_ * size,
                              span.length, is_only_reader());
            }
            break;
        case Kind::ALL_GATHER:
        case Kind::GATHER:
            for (int i = 0; i < world; ++i) {
                const int other = (rank + i) % world;
                char* to = result + static_cast<std::size_t>(other) * call_.count * size;
                if (other == rank) copy_own(to, call_.source + span.at * size, span.length);
                else copy_out(to, slot(other, index), span.length, is_only_reader());
            }
            break;
        case Kind::BROADCAST:
            copy_out(result, broadcast_slot(index), span.length, is_only_reader());
            break;
        case Kind::SCATTER:
            copy_out(result, slot(call_.root, index) + me * block_ * size, span.length,
                     is_only_reader());
            break;
    }
}

// With one reader of a sum (two ranks, or a reduce, which only the root copies out) its lines are
// claimed.
void RunningCall::gather_sums(int index) {
    const int rank = channel_->rank, world = channel_->shape.world;
    if (call_.kind == Kind::REDUCE && rank != call_.root) return;
    const bool is_claimed = world == 2 || call_.kind == Kind::REDUCE;
    const std::size_t size = call_.itemsize;
    const Span span = block(index);
    for (int i = 1; i < world; ++i) {
        const int other = (rank + i) % world;
        const Span part = slice(span, other);
        copy_out(call_.result + (span.at + part.at) * size,
                 sum_slot(other, index) + part.at * size, part.length, is_claimed);
    }
}

}  // namespace potluck::shm
