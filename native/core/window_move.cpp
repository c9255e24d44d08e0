#include "core/window_move.hpp"

#include <algorithm>
#include <cstring>

namespace potluck::window {

namespace {

// Slices begin at whole cache lines.
constexpr std::size_t LINE = 64;
// So much is combined at a time, so that what is read again right after is still near.
constexpr std::size_t BITE = 16 * 1024;
// A slot is written in one round, may hold results in the next, and is read in the one after.
constexpr std::uint32_t ROUNDS_IN_USE = 3;

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

}  // namespace

Outcome Movement::step(Channel& channel) {
    if (channel_ == nullptr) {
        channel_ = &channel;
        begin(channel);
    }
    for (; iteration_ < num_blocks_ + depth_; ++iteration_) {
        const std::uint32_t round = base_ + static_cast<std::uint32_t>(iteration_);
        if (stage_ == 0) {
            if (iteration_ < num_blocks_ && gives()) {
                const auto slots = static_cast<std::uint32_t>(channel.shape.num_slots);
                need_ = {ALL, round - slots + ROUNDS_IN_USE};
                if (!channel.has(need_)) return Outcome::PENDING;
                give(iteration_);
            }
            stage_ = 1;
        }
        if (stage_ == 1) {
            if (iteration_ > 0 && listens()) {
                need_ = takes();
                need_.tick = round;
                if (!channel.has(need_)) return Outcome::PENDING;
                if (!has_compared_) {
                    channel.culprit = channel.dissenter(need_.who, call_.fingerprint);
                    if (channel.culprit >= 0) return Outcome::DESYNC;
                    has_compared_ = true;
                }
                if (iteration_ <= num_blocks_) take(iteration_ - 1);
                if (depth_ == 2 && iteration_ > 1) bring_home(iteration_ - 2);
            }
            stage_ = 2;
        }
        // Right before the tick, in whose line it lies: those who spin take that line away once.
        if (iteration_ == 0) channel.publish(call_.fingerprint);
        if (iteration_ + 1 < num_blocks_ + depth_) channel.arrive();
        stage_ = 0;
    }
    return Outcome::DONE;
}

void Movement::begin(Channel& channel) {
    base_ = channel.tick();
    channel.number = call_.number;
    const Shape& shape = channel.shape;
    const auto world = static_cast<std::size_t>(shape.world);
    const std::size_t bytes = call_.count * call_.itemsize;
    std::size_t most = shape.slot_bytes / call_.itemsize;
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
            most /= world;
            break;
        default:
            break;
    }
    most = most / unit * unit;
    num_blocks_ = static_cast<int>(std::max<std::size_t>(1, (call_.count + most - 1) / most));
    const auto blocks = static_cast<std::size_t>(num_blocks_);
    block_ = std::min(most, round_up((call_.count + blocks - 1) / blocks, unit));
}

bool Movement::gives() const {
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

bool Movement::listens() const {
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

Need Movement::takes() const {
    const bool from_root = call_.kind == Kind::BROADCAST || call_.kind == Kind::SCATTER;
    return {from_root ? call_.root : ALL, 0};
}

Movement::Span Movement::block(int index) const {
    const std::size_t at = std::min(call_.count, static_cast<std::size_t>(index) * block_);
    return {at, std::min(block_, call_.count - at)};
}

// The part of `block` that `of_rank` combines, relative to the block.
Movement::Span Movement::slice(Span block, int of_rank) const {
    const auto world = static_cast<std::size_t>(channel_->shape.world);
    const std::size_t unit = std::max<std::size_t>(1, LINE / call_.itemsize);
    const std::size_t each = round_up((block.length + world - 1) / world, unit);
    const std::size_t at = std::min(block.length, static_cast<std::size_t>(of_rank) * each);
    return {at, std::min(each, block.length - at)};
}

char* Movement::slot(int of_rank, int index) const {
    return channel_->slot(of_rank, base_ + static_cast<std::uint32_t>(index));
}

// Combining from several sources would overwrite one of them before it is read.
bool Movement::is_over_own_part() const {
    const auto me = static_cast<std::size_t>(channel_->rank);
    return call_.kind == Kind::REDUCE_SCATTER &&
           call_.result == call_.source + me * call_.count * call_.itemsize;
}

void Movement::copy_slice(char* to, const char* from, std::size_t length) const {
    if (length != 0 && to != from) std::memcpy(to, from, length * call_.itemsize);
}

void Movement::give(int index) {
    const int rank = channel_->rank, world = channel_->shape.world;
    const std::size_t size = call_.itemsize;
    const Span span = block(index);
    char* mine = slot(rank, index);
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
                if (other == rank) continue;  // combined from where it is
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
                if (other == rank && !is_over_own_part()) continue;  // taken from where it is
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
    // A rank that only gives has its own part to bring home.
    if (call_.kind == Kind::SCATTER) {
        copy_slice(call_.result + span.at * size,
                   call_.source + (static_cast<std::size_t>(rank) * call_.count + span.at) * size,
                   span.length);
    }
}

void Movement::take(int index) {
    const int rank = channel_->rank, world = channel_->shape.world;
    const auto me = static_cast<std::size_t>(rank);
    const std::size_t size = call_.itemsize;
    const Span span = block(index);
    const void* sources[MAX_WORLD];
    switch (call_.kind) {
        case Kind::BARRIER:
            break;
        case Kind::ALL_REDUCE:
        case Kind::REDUCE: {
            if (depth_ == 1) {
                for (int other = 0; other < world; ++other) sources[other] = slot(other, index);
                combine_all(call_.combination, call_.result + span.at * size, sources, world,
                            span.length);
                break;
            }
            const Span part = slice(span, rank);
            const std::size_t bite = BITE / size;
            for (std::size_t done = 0; done < part.length; done += bite) {
                const std::size_t length = std::min(bite, part.length - done);
                const std::size_t at = part.at + done;
                for (int other = 0; other < world; ++other) {
                    sources[other] = other == rank ? call_.source + (span.at + at) * size
                                                   : slot(other, index) + at * size;
                }
                char* total = slot(rank, index) + at * size;
                combine_all(call_.combination, total, sources, world, length);
                if (call_.kind == Kind::ALL_REDUCE || rank == call_.root) {
                    copy_slice(call_.result + (span.at + at) * size, total, length);
                }
            }
            break;
        }
        case Kind::REDUCE_SCATTER:
            for (int other = 0; other < world; ++other) {
                sources[other] = other == rank && !is_over_own_part()
                                     ? call_.source + (me * call_.count + span.at) * size
                                     : slot(other, index) + me * block_ * size;
            }
            combine_all(call_.combination, call_.result + span.at * size, sources, world,
                        span.length);
            break;
        case Kind::ALL_TO_ALL:
            for (int i = 0; i < world; ++i) {
                const int other = (rank + i) % world;
                const auto part = static_cast<std::size_t>(other) * call_.count + span.at;
                copy_slice(call_.result + part * size,
                           other == rank ? call_.source + part * size
                                         : slot(other, index) + me * block_ * size,
                           span.length);
            }
            break;
        case Kind::ALL_GATHER:
        case Kind::GATHER:
            for (int i = 0; i < world; ++i) {
                const int other = (rank + i) % world;
                const auto part = static_cast<std::size_t>(other) * call_.count + span.at;
                copy_slice(call_.result + part * size,
                           other == rank ? call_.source + span.at * size : slot(other, index),
                           span.length);
            }
            break;
        case Kind::BROADCAST:
            copy_slice(call_.result + span.at * size, slot(call_.root, index), span.length);
            break;
        case Kind::SCATTER:
            copy_slice(call_.result + span.at * size,
                       slot(call_.root, index) + me * block_ * size, span.length);
            break;
    }
}

void Movement::bring_home(int index) {
    const int rank = channel_->rank, world = channel_->shape.world;
    if (call_.kind == Kind::REDUCE && rank != call_.root) return;
    const Span span = block(index);
    for (int i = 1; i < world; ++i) {
        const int other = (rank + i) % world;
        const Span part = slice(span, other);
        copy_slice(call_.result + (span.at + part.at) * call_.itemsize,
                   slot(other, index) + part.at * call_.itemsize, part.length);
    }
}

}  // namespace potluck::window
