// Conversions between the Python values of the tests and the types of the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind_buffer.hpp"
#include "core/loop/frame.hpp"

namespace potluck::testing {

namespace nb = nanobind;

inline nb::object python(const char* module, const char* name) {
    return nb::module_::import_(module).attr(name);
}

// A frame of wire/frames.py, which is a tuple of its fields.
inline Frame to_frame(nb::handle object) {
    const nb::tuple fields = nb::borrow<nb::tuple>(object);
    Frame frame;
    frame.kind = static_cast<Kind>(nb::cast<int>(fields[0]));
    frame.epoch = nb::cast<uint32_t>(fields[1]);
    frame.channel = nb::cast<uint32_t>(fields[2]);
    frame.chunk = nb::cast<uint32_t>(fields[3]);
    frame.sequence = nb::cast<uint64_t>(fields[4]);
    frame.segment = nb::cast<uint32_t>(fields[5]);
    frame.length = nb::cast<uint32_t>(fields[6]);
    frame.fingerprint = nb::cast<uint64_t>(fields[7]);
    frame.source = nb::cast<uint16_t>(fields[8]);
    frame.dtype = nb::cast<uint8_t>(fields[9]);
    frame.flags = nb::cast<uint8_t>(fields[10]);
    frame.tag = nb::cast<int32_t>(fields[11]);
    return frame;
}

inline nb::object from_frame(const Frame& frame) {
    const nb::object kind = python("potluck._core.wire.frames", "Kind")(static_cast<int>(frame.kind));
    return python("potluck._core.wire.frames", "Frame")(
        kind, frame.epoch, frame.channel, frame.chunk, frame.sequence, frame.segment, frame.length,
        frame.fingerprint, frame.source, frame.dtype, frame.flags, frame.tag);
}

inline nb::object view(const uint8_t* data, size_t count, bool writable = false) {
    static uint8_t nothing = 0;
    auto* at = reinterpret_cast<char*>(const_cast<uint8_t*>(data == nullptr ? &nothing : data));
    return nb::steal(PyMemoryView_FromMemory(at, static_cast<Py_ssize_t>(count),
                                             writable ? PyBUF_WRITE : PyBUF_READ));
}

using Held = std::shared_ptr<bind::Buffer>;

inline Held hold(nb::handle object, bool writable) {
    return std::make_shared<bind::Buffer>(object, writable);
}

inline uint8_t* bytes_of(const Held& held) { return static_cast<uint8_t*>(held->data()); }

// One line per file of this folder; called by testing.cpp.
void connection(nb::module_& m);
void connections(nb::module_& m);
void running(nb::module_& m);

}  // namespace potluck::testing
