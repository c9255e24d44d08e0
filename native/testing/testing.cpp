// The extension module potluck._native_testing: exposes the state machines of the native loop, so
// that the unit tests of the Python loop run on them too. Built for development only; no wheel
// contains it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind.hpp"
#include "convert.hpp"
#include "core/loop/flow_control.hpp"
#include "core/loop/hang_detection.hpp"
#include "core/loop/mailbox.hpp"
#include "core/tls/stream.hpp"

namespace potluck::testing {

namespace {

void errors() {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ProtocolError& error) {
            PyErr_SetString(python("potluck.errors", "ProtocolError").ptr(), error.what());
        } catch (const LinkError& error) {
            PyErr_SetString(python("potluck.errors", "LinkError").ptr(), error.what());
        }
    });
}

void flow_control(nb::module_& m) {
    m.attr("FRAME_OVERHEAD") = frame_overhead;
    nb::class_<FlowControl>(m, "FlowControl")
        .def(nb::init<uint64_t>())
        .def("has_begun", &FlowControl::has_begun)
        .def("may_send", &FlowControl::may_send)
        .def("has_credit", &FlowControl::has_credit)
        .def("sent", &FlowControl::sent)
        .def("add_credit", &FlowControl::add_credit)
        .def("hold", &FlowControl::hold)
        .def("release", &FlowControl::release)
        .def("consume", &FlowControl::consume)
        .def_prop_ro("is_filling", &FlowControl::is_filling)
        .def_prop_ro("in_flight", &FlowControl::in_flight)
        .def_prop_ro("held_bytes", &FlowControl::held_bytes);
}

void hang_detection(nb::module_& m) {
    nb::class_<HangCheck>(m, "HangCheck")
        .def(
            "__init__",
            [](HangCheck* self, const nb::dict& reports) {
                new (self) HangCheck();
                for (const auto& [rank, has_called] : reports) {
                    self->reports.emplace_back(nb::cast<int>(rank), nb::cast<bool>(has_called));
                }
            },
            nb::arg("reports") = nb::dict())
        .def("blocking_rank", &HangCheck::blocking_rank, nb::arg("ranks"), nb::arg("awaited"),
             nb::kw_only(), nb::arg("final"));
    nb::class_<HangDetector>(m, "HangDetector")
        .def(nb::init<>())
        .def("get", &HangDetector::get, nb::rv_policy::reference_internal)
        .def(
            "open", [](HangDetector& detector, const Key& key) { return detector.open(key); },
            nb::rv_policy::reference_internal);
}

nb::object rank_or_none(int rank) { return rank < 0 ? nb::none() : nb::cast(rank); }

// An unexpected message as the test sees it: a copy that shares the payload.
nb::object arrived_or_none(bool is_there, const Arrived& arrived) {
    return is_there ? nb::cast(arrived) : nb::none();
}

void mailbox(nb::module_& m) {
    nb::class_<Operation>(m, "Operation")
        .def("awaited", &Operation::awaited)
        .def("missing", [](const Operation& operation, const std::set<int>& departed) {
            return rank_or_none(operation.missing(departed));
        });
    nb::class_<Sending, Operation>(m, "Sending")
        .def(
            "__init__",
            [](Sending* self, int peer, uint32_t channel, int32_t tag, uint8_t dtype,
               uint64_t number, nb::handle data) {
                new (self) Sending(nullptr);
                const bind::Buffer buffer(data, false);  // the test keeps it
                self->peer = peer;
                self->channel = channel;
                self->tag = tag;
                self->dtype = dtype;
                self->number = number;
                self->data = static_cast<const uint8_t*>(buffer.data());
                self->nbytes = buffer.size();
            })
        .def_rw("number", &Sending::number);
    nb::class_<Receiving, Operation>(m, "Receiving")
        .def("__init__",
             [](Receiving* self, int source, uint32_t channel, std::vector<int> ranks, int32_t tag,
                uint8_t dtype, nb::handle data) {
                 new (self) Receiving(nullptr);
                 const bind::Buffer buffer(data, true);  // the test keeps it
                 self->source = source;
                 self->channel = channel;
                 self->ranks = std::move(ranks);
                 self->tag = tag;
                 self->dtype = dtype;
                 self->data = static_cast<uint8_t*>(buffer.data());
                 self->nbytes = buffer.size();
             })
        .def_rw("matched", &Receiving::matched);
    nb::class_<Arrived>(m, "Arrived")
        .def("__init__",
             [](Arrived* self, int source, nb::handle frame, uint64_t nbytes, nb::handle payload) {
                 new (self) Arrived{source, to_frame(frame), nbytes, nullptr};
                 if (payload.is_none()) return;
                 const bind::Buffer buffer(payload, false);
                 self->payload.reset(new uint8_t[std::max<size_t>(1, buffer.size())]);
                 if (buffer.size() > 0) {
                     std::memcpy(self->payload.get(), buffer.data(), buffer.size());
                 }
             })
        .def_prop_rw("frame", [](const Arrived& arrived) { return from_frame(arrived.frame); },
                     [](Arrived& arrived, nb::handle frame) { arrived.frame = to_frame(frame); })
        .def("__eq__", [](const Arrived& one, const Arrived& other) {
            return one.payload == other.payload && one.frame.sequence == other.frame.sequence;
        });
    m.def("fits", &fits);
    nb::class_<Mailbox>(m, "Mailbox")
        .def(nb::init<>())
        .def("post",
             [](Mailbox& box, const ReceivingPtr& receive) {
                 Arrived arrived{};
                 const bool is_there = box.post(receive, arrived);
                 return arrived_or_none(is_there, arrived);
             })
        .def("arrive", [](Mailbox& box, const Arrived& arrived) { return box.arrive(arrived); })
        .def("add_sending", [](Mailbox& box, const SendingPtr& sending) {
            box.sending[sending->number] = sending;
        })
        .def("pending", [](const Mailbox& box) {
            nb::list items;
            box.each_pending([&](const Operation* operation) {
                items.append(nb::cast(operation, nb::rv_policy::reference));
            });
            return items;
        });
}

}  // namespace

}  // namespace potluck::testing

NB_MODULE(_native_testing, m) {
    namespace testing = potluck::testing;
    m.doc() = "The state machines of the native loop, for tests/unit/engine/loop";
    testing::errors();
    testing::flow_control(m);
    testing::hang_detection(m);
    testing::mailbox(m);
    testing::connection(m);
    testing::connections(m);
    potluck::bind::loop(m);  // compiled plans
    testing::running(m);
}
