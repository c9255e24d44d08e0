#include "core/shm/queue.hpp"

#include <algorithm>

#include "core/shm/engine.hpp"

namespace potluck::shm {

namespace {

constexpr std::int64_t LONGEST_SLEEP_NS = 50'000'000;
constexpr int MOST_ATTEMPTS = 100;

}  // namespace

// -- telling that calls have ended

void Notifier::push(std::uint64_t id) {
    {
        const std::lock_guard hold(lock_);
        ended_.push_back(id);
    }
    changed_.notify_one();
}

std::uint64_t Notifier::next() {
    std::unique_lock hold(lock_);
    changed_.wait(hold, [this] { return is_closed_ || !ended_.empty(); });
    if (ended_.empty()) return 0;
    const std::uint64_t id = ended_.front();
    ended_.pop_front();
    return id;
}

void Notifier::close() {
    {
        const std::lock_guard hold(lock_);
        is_closed_ = true;
    }
    changed_.notify_all();
}

bool Ticket::watch() {
    std::uint32_t before = OPEN;
    return watched_.compare_exchange_strong(before, AWAITED) || before == AWAITED;
}

void Ticket::end(Outcome how, Channel& channel) {
    outcome = how;
    if (how == Outcome::TIMEOUT || how == Outcome::LEFT || how == Outcome::DESYNC) {
        faulty_rank = how == Outcome::TIMEOUT ? channel.laggard(movement.need()) : channel.faulty_rank;
        if (how == Outcome::DESYNC) theirs = channel.theirs;
        has_begun = faulty_rank < 0 || !channel.has_not_called(faulty_rank, movement.base());
    }
}

// `done_` is OPEN, then AWAITED if a thread sleeps on it, then ENDED. The exchange tells whether
// there is a sleeper, so that a call which nobody sleeps for costs no system call. `watched_` works
// alike, for the notifier.
void Ticket::publish(Notifier& notifier) {
    const bool has_failed = outcome != Outcome::DONE && outcome != Outcome::STOPPED;
    if (done_.exchange(ENDED, std::memory_order_seq_cst) == AWAITED) wake_all(done_);
    if (watched_.exchange(ENDED) == AWAITED || has_failed) notifier.push(id);
}

void Ticket::sleep(std::int64_t until_ns) {
    std::uint32_t before = OPEN;
    if (done_.compare_exchange_strong(before, AWAITED) || before == AWAITED) {
        sleep_on({&done_, AWAITED}, std::min(until_ns - now_ns(), LONGEST_SLEEP_NS));
    }
}

// -- the queue

Queue::Queue(void* memory, const Shape& shape, int rank, std::int64_t spin_ns,
             std::shared_ptr<Engine> engine, std::shared_ptr<Notifier> notifier)
    : channel(memory, shape, rank, spin_ns),
      engine_(std::move(engine)),
      notifier_(std::move(notifier)) {}

bool Queue::has_work() {
    const std::lock_guard hold(lock_);
    return !calls_.empty();
}

std::int64_t Queue::ongoing() {
    {
        const std::lock_guard hold(lock_);
        if (!is_driven_ && calls_.empty()) return -1;
    }
    std::uint64_t ended = 0;
    for (const Stats& each : stats_) {
        for (const Counter& counter : each.seconds) ended += counter.get();
    }
    return static_cast<std::int64_t>(ended);
}

bool Queue::reserve() {
    for (int attempt = 0; attempt < MOST_ATTEMPTS; ++attempt) {
        {
            const std::lock_guard hold(lock_);
            if (!calls_.empty()) return false;
            if (!is_driven_) {
                is_driven_ = true;
                return true;
            }
        }
        relax();  // no call is left: the thread that ended the last one is about to let the channel go
    }
    return false;
}

template <class Wait>
Outcome Queue::drive(Ticket& ticket, Wait&& wait) {
    // A call that has all it needs ends well, whatever became of the group since it began.
    if (!ticket.movement.has_begun() && channel.is_stopped()) return Outcome::STOPPED;
    while (true) {
        Outcome outcome = ticket.movement.step(channel);
        if (outcome != Outcome::PENDING) return outcome;
        outcome = wait(ticket.movement.need());
        if (outcome != Outcome::DONE) return outcome;
    }
}

Outcome Queue::run(Ticket& ticket, std::int64_t until_ns) {
    Outcome outcome = drive(ticket, [&](const Need& need) {
        return channel.wait(need, std::min(until_ns, ticket.deadline_ns));
    });
    if (outcome == Outcome::PENDING) {
        if (now_ns() < ticket.deadline_ns) return outcome;
        outcome = Outcome::TIMEOUT;
    }
    end(ticket, outcome);
    return outcome;
}

Outcome Queue::dash(Ticket& ticket) {
    const Outcome outcome = drive(ticket, [&](const Need& need) { return channel.glance(need); });
    if (outcome != Outcome::PENDING) end(ticket, outcome);
    return outcome;
}

void Queue::end(Ticket& ticket, Outcome outcome) {
    const std::int64_t now = now_ns();
    conclude(ticket, outcome, now);
    blocked_.add(static_cast<std::uint64_t>(now - ticket.began_ns));
    release();
}

void Queue::hand_over(Tickets ticket) {
    {
        const std::lock_guard hold(lock_);
        calls_.push_front(std::move(ticket));
        is_driven_ = false;
    }
    engine_->ring();
}

void Queue::submit(Tickets ticket) {
    {
        const std::lock_guard hold(lock_);
        calls_.push_back(std::move(ticket));
    }
    engine_->ring();
}

bool Queue::wait(const Tickets& ticket, std::int64_t until_ns) {
    const std::int64_t began = now_ns();
    while (!ticket->is_done()) {
        if (now_ns() >= until_ns) break;
        if (!take()) {
            ticket->sleep(until_ns);
            continue;
        }
        while (!ticket->is_done()) {
            const Tickets first = front();
            Outcome outcome = drive(*first, [&](const Need& need) {
                return channel.wait(need, std::min(until_ns, first->deadline_ns));
            });
            if (outcome == Outcome::PENDING) {
                if (now_ns() < first->deadline_ns) break;  // the caller's patience has ended
                outcome = Outcome::TIMEOUT;
            }
            finish_front(first, outcome);
        }
        release();
    }
    blocked_.add(static_cast<std::uint64_t>(now_ns() - began));
    return ticket->is_done();
}

Queue::Poll Queue::poll(Watch* watch, std::int64_t* until_ns) {
    if (!take()) return Poll::IDLE;
    bool has_moved = false;
    Poll found = Poll::IDLE;
    while (const Tickets first = front()) {
        const std::uint32_t before = channel.tick();
        const bool is_late = !first->movement.has_begun() && channel.is_stopped();
        Outcome outcome = is_late ? Outcome::STOPPED : first->movement.step(channel);
        has_moved = has_moved || channel.tick() != before;
        if (outcome == Outcome::PENDING) {
            const Need& need = first->movement.need();
            outcome = channel.reason_to_stop(need);
            if (outcome == Outcome::PENDING && now_ns() >= first->deadline_ns) {
                outcome = Outcome::TIMEOUT;
            }
            if (outcome == Outcome::PENDING) {
                if (watch == nullptr) break;
                if (!channel.prepare_sleep(need, watch)) continue;
                *until_ns = std::min(*until_ns, first->deadline_ns);
                found = Poll::BLOCKED;
                break;
            }
        }
        finish_front(first, outcome);
        has_moved = true;
    }
    {
        const std::lock_guard hold(lock_);
        is_driven_ = false;
    }
    return found == Poll::IDLE && has_moved ? Poll::MOVED : found;
}

void Queue::stop(bool for_all) {
    channel.stop(for_all);
    if (has_work()) engine_->ring();
}

bool Queue::take() {
    {
        const std::lock_guard hold(lock_);
        if (is_driven_ || calls_.empty()) return false;
        is_driven_ = true;
    }
    channel.awake();
    return true;
}

void Queue::release() {
    bool has_more = false;
    {
        const std::lock_guard hold(lock_);
        is_driven_ = false;
        has_more = !calls_.empty();
    }
    if (has_more) engine_->ring();
}

Tickets Queue::front() {
    const std::lock_guard hold(lock_);
    return calls_.empty() ? nullptr : calls_.front();
}

void Queue::conclude(Ticket& ticket, Outcome outcome, std::int64_t now) {
    ticket.end(outcome, channel);
    if (outcome == Outcome::DONE) {
        stats_[static_cast<std::size_t>(ticket.movement.call().kind)].add(now - ticket.began_ns,
                                                                          ticket.nbytes);
    } else {
        // The slots hold half a call, and ranks differ in how far they are: no later call can be
        // right.
        channel.stop(true);
    }
}

void Queue::finish_front(const Tickets& ticket, Outcome outcome) {
    conclude(*ticket, outcome, now_ns());
    {
        const std::lock_guard hold(lock_);
        calls_.pop_front();
    }
    ticket->publish(*notifier_);
}

}  // namespace potluck::shm
