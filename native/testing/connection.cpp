// Exposes one native connection, over a link that the test makes in Python.
#include "core/loop/connection.hpp"

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "convert.hpp"
#include "link.hpp"

namespace potluck::testing {

namespace {

// A connection, with the slots of link memory to which it only points.
class TestConnection {
public:
    TestConnection(int rank, const nb::object& link)
        : counters_(std::make_shared<Counters>()),
          connection_(to_link(rank, link, slots_), counters_) {}

    void push_control(nb::handle outgoing) { connection_.control.push_back(to_outgoing(outgoing)); }

    bool write(const nb::callable& next_outgoing) {
        return connection_.write([&](Connection&, Outgoing& outgoing) {
            const nb::object next = next_outgoing();
            if (next.is_none()) return false;
            outgoing = to_outgoing(next);
            return true;
        });
    }

    bool read(const nb::callable& route) {
        return connection_.read([&](Connection&, const Frame& frame) {
            return to_sink(route(from_frame(frame)), frame);
        });
    }

    const Connection& connection() const { return connection_; }
    const Counters& counters() const { return *counters_; }

private:
    std::vector<Held> slots_;
    std::shared_ptr<Counters> counters_;
    Connection connection_;
};

}  // namespace

void connection(nb::module_& m) {
    m.attr("BUDGET") = budget_bytes;
    nb::class_<TestConnection>(m, "Connection")
        .def(nb::init<int, nb::object>())
        .def("push_control", &TestConnection::push_control)
        .def("write", &TestConnection::write)
        .def("read", &TestConnection::read)
        .def("can_start",
             [](const TestConnection& self, size_t count) {
                 return self.connection().can_start(count);
             })
        .def_prop_ro("is_blocked",
                     [](const TestConnection& self) { return self.connection().is_blocked; })
        .def_prop_ro("is_writing",
                     [](const TestConnection& self) { return self.connection().is_writing(); })
        .def_prop_ro("bytes_sent",
                     [](const TestConnection& self) { return self.counters().bytes_sent.load(); })
        .def_prop_ro(
            "bytes_received",
            [](const TestConnection& self) { return self.counters().bytes_received.load(); })
        .def_prop_ro("bytes_in_shared_memory", [](const TestConnection& self) {
            return self.counters().bytes_in_shared_memory.load();
        });
}

}  // namespace potluck::testing
