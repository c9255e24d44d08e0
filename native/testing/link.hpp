// A stream over a link of a test: a Python object with the methods of potluck._core.transport.link.Link.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "convert.hpp"
#include "core/loop/connection.hpp"
#include "core/tls/link.hpp"

namespace potluck::testing {

class PythonStream : public Stream {
public:
    explicit PythonStream(nb::object link) : link_(std::move(link)) {}

    void close() { link_.attr("close")(); }

    void take_over(std::string) override {}
    int fd() const override { return nb::cast<int>(link_.attr("fileno")()); }
    size_t send(const uint8_t* data, size_t count) override {
        return call("send", view(data, count));
    }
    void flush() override {}
    size_t unsent() const override { return 0; }
    size_t recv(uint8_t* buffer, size_t count) override {
        return call("recv_into", view(buffer, count, true));
    }
    bool is_readable() const override { return nb::cast<bool>(link_.attr("readable")); }

private:
    // Calls a method of the link; Python's LinkError becomes the core's.
    size_t call(const char* name, const nb::object& buffer) const {
        try {
            return nb::cast<size_t>(link_.attr(name)(buffer));
        } catch (nb::python_error& error) {
            if (!error.matches(python("potluck.errors", "LinkError"))) throw;
            throw LinkError(nb::str(error.value()).c_str());
        }
    }

    nb::object link_;
};

// `slots` keeps the link memory alive, to which the returned link only points.
inline AdoptedLink to_link(int rank, const nb::object& object, std::vector<Held>& slots) {
    AdoptedLink link;
    link.rank = rank;
    link.stream = std::make_shared<PythonStream>(object);
    const nb::object memory = object.attr("memory");
    if (memory.is_none()) return link;
    link.memory.slot_bytes = nb::cast<uint32_t>(memory.attr("slot_bytes"));
    for (int slot = 0; slot < nb::cast<int>(memory.attr("num_slots")); ++slot) {
        slots.push_back(hold(memory.attr("outgoing")(slot), true));
        link.memory.outgoing.push_back(bytes_of(slots.back()));
        slots.push_back(hold(memory.attr("incoming")(slot), false));
        link.memory.incoming.push_back(bytes_of(slots.back()));
    }
    return link;
}

// From (frame, payload, sent or None): connection.Outgoing of the Python loop.
inline Outgoing to_outgoing(nb::handle object) {
    const nb::tuple fields = nb::borrow<nb::tuple>(object);
    const Held payload = hold(fields[1], false);
    Outgoing outgoing;
    outgoing.frame = to_frame(fields[0]);
    outgoing.payload = bytes_of(payload);
    const nb::object sent = fields[2];
    outgoing.sent = [payload, sent] {
        if (!sent.is_none()) sent();
    };
    return outgoing;
}

// From (buffer or None, complete): connection.Sink of the Python loop.
inline Sink to_sink(const nb::object& object, const Frame& frame) {
    const nb::tuple fields = nb::borrow<nb::tuple>(object);
    Held buffer;
    if (!fields[0].is_none()) buffer = hold(fields[0], true);
    Sink sink;
    sink.buffer = buffer ? bytes_of(buffer) : nullptr;
    sink.complete = [buffer, complete = nb::object(fields[1]),
                     length = frame.length](const uint8_t* payload) {
        complete(view(payload, length));
    };
    return sink;
}

}  // namespace potluck::testing
