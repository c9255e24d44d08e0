// Exposes the native connections of a group, without a loop: a test makes the links and calls
// `move`.
#include "core/loop/connections.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "convert.hpp"
#include "link.hpp"

namespace potluck::testing {

namespace {

std::vector<std::shared_ptr<Counters>> counters_of(int world_size) {
    std::vector<std::shared_ptr<Counters>> counters;
    for (int rank = 0; rank < world_size; ++rank) {
        counters.push_back(std::make_shared<Counters>());
    }
    return counters;
}

class TestConnections {
public:
    TestConnections(uint32_t epoch, int world_size, uint64_t max_early_bytes)
        : connections_(state_, {epoch, 0, world_size}, max_early_bytes, counters_of(world_size),
                       {[] { return nullptr; }, [] {}, [this](int rank) { held.push_back(rank); },
                        [this](int rank) { wanted.push_back(rank); },
                        [](const AdoptedLink& link) {
                            static_cast<PythonStream&>(*link.stream).close();
                        }}) {}

    std::vector<int> wanted;  // ranks to which a link was requested
    std::vector<int> held;    // ranks of which a frame had to be kept

    void adopt(int rank, const nb::object& link) {
        connections_.adopt(to_link(rank, link, slots_));
    }

    void send_control(int rank, nb::handle outgoing) {
        connections_.send_control(rank, to_outgoing(outgoing));
    }

    void move(const nb::callable& route, const nb::callable& next_outgoing) {
        connections_.move(
            [&](Connection& connection, const Frame& frame) {
                if (frame.kind == Kind::close) connection.has_closed = true;
                return to_sink(route(connection.rank(), from_frame(frame)), frame);
            },
            [&](Connection& connection, Outgoing& outgoing) {
                const nb::object next = next_outgoing(connection.rank());
                if (next.is_none()) return false;
                outgoing = to_outgoing(next);
                return true;
            });
    }

    // (rank, text) of the failure that ended the group, or None.
    nb::object failure() const {
        if (!state_.is_over()) return nb::none();
        return nb::make_tuple(state_.failure().rank, state_.failure().text);
    }

    Connections& all() { return connections_; }

private:
    std::vector<Held> slots_;
    GroupState state_;
    Connections connections_;
};

}  // namespace

void connections(nb::module_& m) {
    nb::class_<TestConnections>(m, "Connections")
        .def(nb::init<uint32_t, int, uint64_t>())
        .def("adopt", &TestConnections::adopt)
        .def("send_control", &TestConnections::send_control)
        .def("move", &TestConnections::move)
        .def("need",
             [](TestConnections& self, const std::vector<int>& ranks) { self.all().need(ranks); })
        .def("pause", [](TestConnections& self, int rank) { self.all().paused.insert(rank); })
        .def("consume", [](TestConnections& self, int rank,
                           uint64_t nbytes) { self.all().consume(rank, nbytes); })
        .def("hold", [](TestConnections& self, int rank,
                        uint64_t nbytes) { self.all().hold(rank, nbytes); })
        .def("release", [](TestConnections& self, int rank,
                           uint64_t nbytes) { self.all().release(rank, nbytes); })
        .def("can_read", [](TestConnections& self, int rank) { self.all().ready.insert(rank); })
        .def("can_write", [](TestConnections& self, int rank) { self.all().on_writable(rank); })
        .def("has_link",
             [](TestConnections& self, int rank) { return self.all().find(rank) != nullptr; })
        .def_prop_ro("departed", [](TestConnections& self) { return self.all().departed; })
        .def_prop_ro("failure", &TestConnections::failure)
        .def_ro("wanted", &TestConnections::wanted)
        .def_ro("held", &TestConnections::held);
}

}  // namespace potluck::testing
