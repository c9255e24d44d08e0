#include "core/shm/queue.hpp"

#include <algorithm>

#include "core/shm/progress_thread.hpp"

namespace potluck::shm {

namespace {

constexpr std::int64_t MAX_SLEEP_NS = 50'000'000;
constexpr int MAX_ATTEMPTS = 100;

}  // namespace

// -- completion

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

bool PendingCall::watch() {
    std::uint32_t before = OPEN;
    return watched_.compare_exchange_strong(before, AWAITED) || before == AWAITED;
}

void PendingCall::end(Outcome how, Channel& channel) {
    outcome = how;
    if (how != Outcome::DONE && how != Outcome::STOPPED) {
        faulty_rank = how == Outcome::TIMEOUT ? channel.straggler(running.condition())
                                              : channel.faulty_rank;
        if (how == Outcome::DESYNC) peer_fingerprint = channel.peer_fingerprint;
        has_begun = faulty_rank < 0 || !channel.has_not_called(faulty_rank, running.base());
    }
}

// `done_` is OPEN, then AWAITED if a thread sleeps on it, then ENDED. The exchange tells whether a
// thread sleeps, so that a call without a sleeper costs no system call; and since a sleeper sets
// AWAITED by a compare-exchange from OPEN, it either comes before the exchange, and is woken, or
// sees ENDED. `watched_` works alike, for the notifier.
//
// The exchange is a release: the outcome, and the result that the call wrote, precede it. After it
// the waiting thread may free the arrays.
void PendingCall::publish(Notifier& notifier) {
    const bool has_failed = outcome != Outcome::DONE && outcome != Outcome::STOPPED;
    if (done_.exchange(ENDED, std::memory_order_seq_cst) == AWAITED) wake_all(done_);
    if (watched_.exchange(ENDED) == AWAITED || has_failed) notifier.push(id);
}

void PendingCall::sleep(std::int64_t until_ns) {
    std::uint32_t before = OPEN;
    if (done_.compare_exchange_strong(before, AWAITED) || before == AWAITED) {
        sleep_on({&done_, AWAITED}, std::min(until_ns - now_ns(), MAX_SLEEP_NS));
    }
}

// -- the queue

Queue::Queue(std::shared_ptr<void> memory, const Shape& shape, int rank, std::int64_t spin_ns,
             std::shared_ptr<ProgressThread> progress_thread, std::shared_ptr<Notifier> notifier)
    : channel(memory.get(), shape, rank, spin_ns),
      memory_(std::move(memory)),
      progress_thread_(std::move(progress_thread)),
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
    // Without a lock: each counter only rises, so equal sums mean that no call has ended between.
    std::uint64_t ended = 0;
    for (const Stats& each : stats_) {
        for (const Counter& counter : each.seconds) ended += counter.get();
    }
    return static_cast<std::int64_t>(ended);
}

// A thread that has ended the last call releases the channel a moment later. It is worth waiting for
// that: a submitted call costs a `PendingCall` on the heap and a wake-up of the progress thread.
bool Queue::reserve() {
    for (int attempt = 0; attempt < MAX_ATTEMPTS; ++attempt) {
        {
            const std::lock_guard hold(lock_);
            if (!calls_.empty() || is_leaving_) return false;
            if (!is_driven_) {
                is_driven_ = true;
                return true;
            }
        }
        relax();
    }
    return false;
}

template <class Wait>
Outcome Queue::drive(PendingCall& pending, Wait&& wait) {
    // Only a call that has not begun is refused. One that has begun may have all that it needs, and
    // then ends well, as it does on the other ranks, though the group has ended since.
    if (!pending.running.has_begun() && channel.is_stopped()) return Outcome::STOPPED;
    while (true) {
        Outcome outcome = pending.running.step(channel);
        if (outcome != Outcome::PENDING) return outcome;
        outcome = wait(pending.running.condition());
        if (outcome != Outcome::DONE) return outcome;
    }
}

Outcome Queue::run(PendingCall& pending, std::int64_t until_ns) {
    Outcome outcome = drive(pending, [&](const Condition& condition) {
        return channel.wait(condition, std::min(until_ns, pending.deadline_ns()));
    });
    if (outcome == Outcome::PENDING) {
        if (now_ns() < pending.deadline_ns()) return outcome;
        outcome = Outcome::TIMEOUT;
    }
    end(pending, outcome);
    return outcome;
}

Outcome Queue::try_run(PendingCall& pending) {
    const Outcome outcome = drive(
        pending, [&](const Condition& condition) { return channel.wait_briefly(condition); });
    if (outcome != Outcome::PENDING) end(pending, outcome);
    return outcome;
}

void Queue::end(PendingCall& pending, Outcome outcome) {
    const std::int64_t now = now_ns();
    conclude(pending, outcome, now);
    blocked_.add(static_cast<std::uint64_t>(now - pending.began_ns));
    release();
}

// In front of the queue: calls that were submitted while this one ran come after it.
void Queue::hand_over(PendingCallPtr pending) {
    {
        const std::lock_guard hold(lock_);
        calls_.push_front(std::move(pending));
        is_driven_ = false;
    }
    progress_thread_->wake();
}

void Queue::submit(PendingCallPtr pending) {
    {
        const std::lock_guard hold(lock_);
        calls_.push_back(std::move(pending));
    }
    progress_thread_->wake();
}

bool Queue::wait(const PendingCallPtr& pending, std::int64_t until_ns) {
    const std::int64_t began = now_ns();
    while (!pending->is_done()) {
        if (now_ns() >= until_ns) break;
        // Another thread drives the channel, and may release it before it comes to this call (its
        // own call has ended, or its time is over). Then the progress thread goes on, or this
        // thread: therefore the sleep has a bound.
        if (!try_acquire()) {
            pending->sleep(until_ns);
            continue;
        }
        while (!pending->is_done()) {
            const PendingCallPtr first = front();
            Outcome outcome = drive(*first, [&](const Condition& condition) {
                return channel.wait(condition, std::min(until_ns, first->deadline_ns()));
            });
            if (outcome == Outcome::PENDING) {
                if (now_ns() < first->deadline_ns()) break;  // `until_ns` has passed
                outcome = Outcome::TIMEOUT;
            }
            finish_front(first, outcome);
        }
        release();
    }
    blocked_.add(static_cast<std::uint64_t>(now_ns() - began));
    return pending->is_done();
}

Queue::Poll Queue::poll(Watch* watch, std::int64_t* until_ns) {
    if (!try_acquire()) return Poll::IDLE;
    bool has_moved = false;
    Poll found = Poll::IDLE;
    while (const PendingCallPtr first = front()) {
        const std::uint32_t before = channel.tick();
        const bool is_late = !first->running.has_begun() && channel.is_stopped();
        Outcome outcome = is_late ? Outcome::STOPPED : first->running.step(channel);
        has_moved = has_moved || channel.tick() != before;
        if (outcome == Outcome::PENDING) {
            // What Channel::wait does, without the waiting.
            const Condition& condition = first->running.condition();
            outcome = channel.reason_to_stop(condition);
            if (outcome == Outcome::PENDING && now_ns() >= first->deadline_ns()) {
                outcome = Outcome::TIMEOUT;
            }
            if (outcome == Outcome::PENDING) {
                if (watch == nullptr) break;
                if (!channel.prepare_sleep(condition, watch)) continue;
                *until_ns = std::min(*until_ns, first->deadline_ns());
                found = Poll::BLOCKED;
                break;
            }
        }
        finish_front(first, outcome);
        has_moved = true;
    }
    let_go();
    return found == Poll::IDLE && has_moved ? Poll::MOVED : found;
}

void Queue::stop(bool for_all) {
    channel.stop(for_all);
    if (has_work()) progress_thread_->wake();
}

bool Queue::try_acquire() {
    {
        const std::lock_guard hold(lock_);
        if (is_driven_ || calls_.empty()) return false;
        is_driven_ = true;
    }
    // The progress thread may have announced a sleep on this channel. From here on this thread
    // polls the ticks itself, and wake-ups of the progress thread would be system calls in vain.
    channel.end_sleep();
    return true;
}

bool Queue::let_go() {
    bool has_more = false, leaves = false;
    {
        const std::lock_guard hold(lock_);
        is_driven_ = false;
        has_more = !calls_.empty();
        leaves = is_leaving_ && !has_more;
    }
    if (leaves) channel.leave(LEFT_CHANNEL);
    return has_more;
}

void Queue::release() {
    if (let_go()) progress_thread_->wake();
}

void Queue::leave_channel() {
    {
        const std::lock_guard hold(lock_);
        is_leaving_ = true;
        if (is_driven_ || !calls_.empty()) return;
    }
    channel.leave(LEFT_CHANNEL);
}

PendingCallPtr Queue::front() {
    const std::lock_guard hold(lock_);
    return calls_.empty() ? nullptr : calls_.front();
}

void Queue::conclude(PendingCall& pending, Outcome outcome, std::int64_t now) {
    pending.end(outcome, channel);
    if (outcome == Outcome::DONE) {
        stats_[static_cast<std::size_t>(pending.running.call().kind)].add(now - pending.began_ns,
                                                                          pending.nbytes);
    } else {
        // There is no recovery within a group: the slots hold half a call, and ranks differ in how
        // far they are, so no later call could be right.
        channel.stop(true);
    }
}

// Removed before it is published: its caller may make the next call at once, which must find the
// queue empty.
void Queue::finish_front(const PendingCallPtr& pending, Outcome outcome) {
    conclude(*pending, outcome, now_ns());
    {
        const std::lock_guard hold(lock_);
        calls_.pop_front();
    }
    pending->publish(*notifier_);
}

}  // namespace potluck::shm
