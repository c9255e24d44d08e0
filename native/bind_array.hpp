// Pointer, shape and dtype of a NumPy array or a torch tensor, for the fast path, where the inquiry
// itself counts (a fraction of a microsecond).
//
// Only of arrays that calls through shared memory can use in place: C-contiguous, in host memory,
// of a supported dtype, neither subclasses nor lazy views. For all others the caller takes the
// usual way, which copies them or explains what is wrong.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace potluck::bind {

class Array {
public:
    Array() = default;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }

    // Describe `object`; false if it is not an array as above. Never raises. For a NumPy array the
    // buffer is held until the destructor runs; a tensor is only borrowed, so the caller must hold
    // a reference.
    bool describe(nanobind::handle object, bool writable);

    char* data() const { return data_; }
    std::size_t count() const { return count_; }
    std::size_t bytes() const { return bytes_; }
    int ndim() const { return ndim_; }
    const std::int64_t* dims() const { return dims_; }
    int dtype() const { return dtype_; }  // 0: none

private:
    bool describe_numpy(nanobind::handle object, bool writable);
    bool describe_tensor(nanobind::handle object);

    Py_buffer view_{};
    char* data_ = nullptr;
    const std::int64_t* dims_ = nullptr;
    std::size_t count_ = 1;
    std::size_t bytes_ = 0;
    int ndim_ = 0;
    int dtype_ = 0;
};

}  // namespace potluck::bind
