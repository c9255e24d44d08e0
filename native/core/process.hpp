// Forked processes. A fork copies an object, but not the threads that serve it: in the child they do
// not exist, locks that they held stay locked, and what they wait on is never told. So an object
// with threads, locks or memory that is shared with other processes is used, and destroyed, only in
// the process that made it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace potluck {

// How many forks lie between the process that loaded this library and the present one.
std::uint32_t num_forks();

// False in children that were forked after it was made. A local variable or member of what must not
// go on there.
class MadeHere {
public:
    MadeHere() : made_at_(num_forks()) {}
    explicit operator bool() const { return made_at_ == num_forks(); }

private:
    std::uint32_t made_at_;
};

// An object that a forked child never destroys: to destroy a running thread ends the process, and to
// destroy a condition variable waits for its waiters, which do not exist there.
template <class T, class... Arguments>
std::shared_ptr<T> make_for_this_process(Arguments&&... arguments) {
    const auto destroy = [here = MadeHere()](T* made) {
        if (here) delete made;
    };
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), destroy);
}

}  // namespace potluck
