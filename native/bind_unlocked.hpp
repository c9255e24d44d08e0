// Releases the interpreter lock (GIL) for native work.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

namespace potluck::bind {

// Releases the interpreter lock until the end of the scope.
//
// Unlike nanobind's own guard, this one survives the end of the interpreter. Before Python 3.14 a
// daemon thread that asks for the lock of an interpreter that is shutting down is ended by
// pthread_exit, which unwinds the C++ frames above it. Unwinding through a destructor (noexcept) is
// std::terminate, and the script's exit code is lost. So such a thread sleeps here until the
// process has ended, as it does by itself from Python 3.14 on.
class Unlocked {
public:
    Unlocked() noexcept : state_(PyEval_SaveThread()) {}
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    ~Unlocked() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // the unwinding of pthread_exit; glibc aborts if this block is ever left
            while (true) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }

private:
    PyThreadState* state_;
};

}  // namespace potluck::bind
