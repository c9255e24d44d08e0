// What a NumPy array or a torch tensor says of itself, asked in the least time that there is.
//
// Only arrays that calls through shared memory can read and write where they are: C-contiguous, in
// host memory, of a dtype of ours, and neither subclasses nor lazy views. For all others the caller
// takes the slow path, which copies them or says what is wrong.
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

    // False: not an array as above. Never raises.
    bool take(nanobind::handle object, bool writable);

    char* data() const { return data_; }
    std::size_t count() const { return count_; }
    std::size_t bytes() const { return bytes_; }
    int ndim() const { return ndim_; }
    const std::int64_t* dims() const { return dims_; }
    int dtype() const { return dtype_; }  // 0: none

private:
    bool take_numpy(nanobind::handle object, bool writable);
    bool take_tensor(nanobind::handle object);

    Py_buffer view_{};
    char* data_ = nullptr;
    const std::int64_t* dims_ = nullptr;
    std::size_t count_ = 1;
    std::size_t bytes_ = 0;
    int ndim_ = 0;
    int dtype_ = 0;
};

}  // namespace potluck::bind
