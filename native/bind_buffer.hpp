// A Python object's memory as bytes, by the buffer protocol (NumPy arrays, memoryviews, bytes).
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "bind_unlocked.hpp"

namespace potluck::bind {

// Contiguous memory. While a Buffer lives the object may neither free nor resize it. Raises what
// the object raises (BufferError, TypeError).
class Buffer {
public:
    Buffer(nanobind::handle object, bool writable) {
        const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
    }
    Buffer(Buffer&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }

    void* data() const { return view_.buf; }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

// Work on fewer bytes takes less time than to release the interpreter lock and take it again.
constexpr std::size_t WORTH_UNLOCKING = 32768;

// Runs `work`, without the interpreter lock if there are enough bytes.
template <class Work>
void without_lock(std::size_t bytes, Work&& work) {
    if (bytes < WORTH_UNLOCKING) return work();
    const Unlocked unlocked;
    work();
}

}  // namespace potluck::bind
