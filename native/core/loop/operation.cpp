#include "core/loop/operation.hpp"

namespace potluck {

Ticket::State Ticket::wait_for(double seconds) {
    std::unique_lock lock(mutex_);
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    changed_.wait_until(lock, until, [this] { return state_ != State::running; });
    return state_;
}

Ticket::State Ticket::state() {
    const std::lock_guard lock(mutex_);
    return state_;
}

double Ticket::seconds() {
    const std::lock_guard lock(mutex_);
    return seconds_;
}

int Ticket::source() {
    const std::lock_guard lock(mutex_);
    return source_;
}

void Ticket::claim() {
    const std::lock_guard lock(mutex_);
    ++claims_;
}

// The listener is called without the lock: it takes a lock of its own (EventQueue).
void Ticket::unclaim() {
    {
        const std::lock_guard lock(mutex_);
        if (--claims_ > 0 || state_ == State::running) return;
    }
    if (const auto listener = listener_.lock()) listener->ended(id);
}

void Ticket::finish(State state, double seconds, int source) {
    bool is_claimed = false;
    {
        const std::lock_guard lock(mutex_);
        if (state_ != State::running) return;
        state_ = state;
        seconds_ = seconds;
        source_ = source;
        is_claimed = claims_ > 0;
        if (is_claimed) changed_.notify_all();
    }
    if (is_claimed) return;
    if (const auto listener = listener_.lock()) listener->ended(id);
}

}  // namespace potluck
