// Exposes a native running plan, without a loop: a test moves its segments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "convert.hpp"
#include "core/loop/plan.hpp"

namespace potluck::testing {

namespace {

// Keeps the arrays of a call alive, to which the running plan only points.
struct Arrays {
    std::vector<Held> held;

    uint8_t* address(nb::handle array) {
        if (array.is_none()) return nullptr;
        held.push_back(hold(array, true));
        return bytes_of(held.back());
    }
};

PlanArguments arguments_of(std::shared_ptr<CompiledPlan> plan, uint64_t sequence, nb::handle source,
                           nb::handle result, nb::handle scratch, nb::handle narrowed,
                           nb::handle residual, Arrays& arrays) {
    PlanArguments made;
    made.plan = std::move(plan);
    made.sequence = sequence;
    made.buffers = {arrays.address(source), arrays.address(result), arrays.address(scratch)};
    made.residual = reinterpret_cast<float*>(arrays.address(residual));
    made.narrowed = arrays.address(narrowed);
    return made;
}

class TestPlan {
public:
    TestPlan(std::shared_ptr<CompiledPlan> plan, uint64_t sequence, nb::handle source,
             nb::handle result, nb::handle scratch, nb::handle narrowed, nb::handle residual)
        : running(arguments_of(std::move(plan), sequence, source, result, scratch, narrowed,
                               residual, arrays_),
                  nullptr) {}

private:
    Arrays arrays_;

public:
    RunningPlan running;
};

nb::object segment_or_none(bool is_there, const Segment& segment) {
    return is_there ? nb::cast(segment) : nb::none();
}

void apply(TestPlan& plan, const Segment& segment, nb::handle payload) {
    const bind::Buffer buffer(payload, false);
    plan.running.apply(segment, static_cast<const uint8_t*>(buffer.data()), 0, buffer.size());
    plan.running.applied(segment);
}

// The payload of a segment's frame.
nb::bytes payload(TestPlan& plan, const Segment& segment) {
    const Bytes encoded = plan.running.encoded(segment);
    const uint8_t* data = encoded ? encoded->data() : segment.data;
    return nb::bytes(reinterpret_cast<const char*>(data), segment.wire_bytes);
}

}  // namespace

void running(nb::module_& m) {
    nb::class_<Segment>(m, "Segment")
        .def_ro("step", &Segment::step)
        .def_ro("index", &Segment::chunk)
        .def_ro("number", &Segment::number)
        .def_ro("wire_bytes", &Segment::wire_bytes)
        .def_prop_ro("memory",
                     [](const Segment& segment) { return view(segment.data, segment.nbytes); });
    nb::class_<TestPlan>(m, "RunningPlan")
        .def(nb::init<std::shared_ptr<CompiledPlan>, uint64_t, nb::handle, nb::handle, nb::handle,
                      nb::handle, nb::handle>(),
             nb::arg("plan"), nb::arg("sequence"), nb::arg("source").none(),
             nb::arg("result").none(), nb::arg("scratch").none(),
             nb::arg("narrowed").none(), nb::arg("residual").none())
        .def_prop_ro("send_peers", [](const TestPlan& plan) { return plan.running.send_peers(); })
        .def_prop_ro("receive_peers",
                     [](const TestPlan& plan) { return plan.running.receive_peers(); })
        .def_prop_ro("is_complete", [](const TestPlan& plan) { return plan.running.is_complete(); })
        .def("chunk_of",
             [](const TestPlan& plan, const Segment& segment) {
                 return plan.running.spec.chunks[segment.chunk].number;
             })
        .def("next_send",
             [](const TestPlan& plan, int peer) {
                 Segment segment;
                 return segment_or_none(plan.running.next_send(peer, segment), segment);
             })
        .def("issue", [](TestPlan& plan, int peer,
                         const Segment& segment) { plan.running.issue(peer, segment); })
        .def("sent", [](TestPlan& plan, const Segment& segment) { plan.running.sent(segment); })
        .def("payload", &payload)
        .def("is_ahead", [](const TestPlan& plan, int peer,
                            int other) { return plan.running.is_ahead(peer, other); })
        .def("next_receive",
             [](const TestPlan& plan, int peer) {
                 Segment segment;
                 return segment_or_none(plan.running.next_receive(peer, segment), segment);
             })
        .def("is_ready", [](const TestPlan& plan,
                            const Segment& segment) { return plan.running.is_ready(segment); })
        .def("combines", [](const TestPlan& plan,
                            const Segment& segment) { return plan.running.combines(segment); })
        .def("arrived", [](TestPlan& plan, int peer,
                           const Segment& segment) { plan.running.arrived(peer, segment); })
        .def("apply", &apply)
        .def("conclude", [](const TestPlan& plan) { plan.running.conclude(); })
        .def("awaited", [](const TestPlan& plan) { return plan.running.awaited(); })
        .def("missing",
             [](const TestPlan& plan, const std::set<int>& departed) {
                 const int rank = plan.running.missing(departed);
                 return rank < 0 ? nb::none() : nb::cast(rank);
             })
        .def("__str__", [](const TestPlan& plan) { return plan.running.name(); });
}

}  // namespace potluck::testing
