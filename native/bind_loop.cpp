// Python binding of the progress loop and its TLS streams, for engine/loop/native.py and
// transport/native_tls.py.
//
// The loop's thread never takes the interpreter lock: a Python thread waits for its events instead.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bind.hpp"
#include "bind_buffer.hpp"
#include "bind_reduction.hpp"
#include "bind_unlocked.hpp"
#include "core/process.hpp"

#ifdef POTLUCK_OPENSSL
#include "core/loop/progress.hpp"
#include "core/tls/local.hpp"
#include "core/tls/tls.hpp"
#endif

namespace nb = nanobind;

namespace potluck::bind {

#ifdef POTLUCK_OPENSSL

namespace {

uint8_t* pointer(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }

// -- tickets

// How often a waiting thread takes the interpreter lock to handle signals (Ctrl-C).
constexpr double signal_s = 0.1;

// Wait for the operation, at most `seconds` (negative: without limit). Returns whether it has
// ended; if so, the caller must handle the end, which is not reported as an event. False in a
// forked child: a signal handler may have forked.
bool wait(Ticket& ticket, double seconds) {
    const MadeHere here;
    const double until = now_s() + seconds;
    ticket.claim();
    while (true) {
        const double left = seconds < 0 ? signal_s : until - now_s();
        Ticket::State state;
        {
            const Unlocked unlocked;
            state = ticket.wait_for(std::clamp(left, 0.0, signal_s));
        }
        if (state != Ticket::State::running) return true;
        const bool is_interrupted = PyErr_CheckSignals() != 0;
        if (here && (is_interrupted || left <= 0)) ticket.unclaim();
        if (is_interrupted) throw nb::python_error();
        if (left <= 0 || !here) return false;
    }
}

// -- the loop

using Steps = std::vector<std::tuple<int, int, uint32_t, bool>>;
using Chunks = std::vector<std::tuple<uint32_t, uint8_t, uint64_t, uint64_t, int64_t, uint32_t>>;

std::shared_ptr<CompiledPlan> compile(std::string call, uint64_t fingerprint, uint32_t channel,
                                      int dtype, nb::handle op, uint64_t segment_bytes,
                                      std::vector<int> ranks, const Chunks& chunks,
                                      const Steps& steps, uint64_t num_concluded,
                                      double divisor, double scale, double late_scale,
                                      bool is_computed_by_all, int codec) {
    PlanSpec spec;
    spec.call = std::move(call);
    spec.fingerprint = fingerprint;
    spec.channel = channel;
    spec.dtype = static_cast<Dtype>(dtype);
    spec.op = reduction_named(op).op;
    spec.divisor = divisor;
    spec.scale = scale;
    spec.late_scale = late_scale;
    spec.segment_bytes = segment_bytes;
    spec.ranks = std::move(ranks);
    for (const auto& [number, buffer, start, elements, residual, num_takers] : chunks) {
        if (buffer >= num_buffers) throw nb::value_error("a chunk in a buffer that does not exist");
        spec.chunks.push_back({number, buffer, start, elements, residual, num_takers});
    }
    for (const auto& [action, peer, chunk, is_coded] : steps) {
        if (action < 0 || action > 2 || peer < 0 ||
            static_cast<size_t>(peer) >= spec.ranks.size() || chunk >= chunks.size()) {
            throw nb::value_error("a step of an action, rank or chunk that does not exist");
        }
        spec.steps.push_back(
            {static_cast<Action>(action), spec.ranks[static_cast<size_t>(peer)], chunk, is_coded});
    }
    spec.num_concluded = num_concluded;
    spec.is_computed_by_all = is_computed_by_all;
    spec.has_codec = codec != 0;
    spec.codec = static_cast<Codec>(codec);
    return std::make_shared<CompiledPlan>(std::move(spec));
}

// The address of an array's memory, null for None. The buffer is released at once: a NumPy array
// does not move its memory, and the Python loop keeps the arrays (_Item.keep) until the ticket has
// ended.
uint8_t* memory_of(nb::handle array) {
    return array.is_none() ? nullptr : static_cast<uint8_t*>(Buffer(array, false).data());
}

void start(ProgressLoop& loop, std::shared_ptr<Ticket> ticket, std::shared_ptr<CompiledPlan> plan,
           uint64_t sequence, double deadline, nb::handle source, nb::handle result,
           nb::handle scratch, nb::handle narrowed, nb::handle residual) {
    uint8_t* from = memory_of(source);
    uint8_t* into = source.is(result) ? from : memory_of(result);
    loop.start({std::move(plan), sequence, deadline, {from, into, memory_of(scratch)},
                reinterpret_cast<float*>(memory_of(residual)), memory_of(narrowed)},
               std::move(ticket));
}

void send(ProgressLoop& loop, std::shared_ptr<Ticket> ticket, std::string call, int peer,
          uint32_t channel, int32_t tag, uint8_t dtype, uintptr_t data, uint64_t nbytes,
          double deadline) {
    auto sending = std::make_shared<Sending>(std::move(ticket));
    sending->call = std::move(call);
    sending->peer = peer;
    sending->channel = channel;
    sending->tag = tag;
    sending->dtype = dtype;
    sending->data = pointer(data);
    sending->nbytes = nbytes;
    sending->until = deadline;
    loop.send(std::move(sending));
}

void receive(ProgressLoop& loop, std::shared_ptr<Ticket> ticket, std::string call, int source,
             uint32_t channel, std::vector<int> ranks, int32_t tag, uint8_t dtype, uintptr_t data,
             uint64_t nbytes, double deadline) {
    auto receiving = std::make_shared<Receiving>(std::move(ticket));
    receiving->call = std::move(call);
    receiving->source = source;
    receiving->channel = channel;
    receiving->ranks = std::move(ranks);
    receiving->tag = tag;
    receiving->dtype = dtype;
    receiving->data = pointer(data);
    receiving->nbytes = nbytes;
    receiving->until = deadline;
    loop.receive(std::move(receiving));
}

void adopt(ProgressLoop& loop, uint64_t id, int rank, std::shared_ptr<Stream> stream,
           std::string peer, uint32_t slot_bytes, const std::vector<uintptr_t>& outgoing,
           const std::vector<uintptr_t>& incoming) {
    if (outgoing.size() != incoming.size()) throw nb::value_error("link memory has pairs of slots");
    AdoptedLink link;
    link.id = id;
    link.rank = rank;
    stream->take_over(std::move(peer));
    link.stream = std::move(stream);
    link.memory.slot_bytes = slot_bytes;
    for (uintptr_t slot : outgoing) link.memory.outgoing.push_back(pointer(slot));
    for (uintptr_t slot : incoming) link.memory.incoming.push_back(pointer(slot));
    loop.adopt(std::move(link));
}

const char* name_of(Event::Kind kind) {
    switch (kind) {
        case Event::Kind::operation_ended: return "operation ended";
        case Event::Kind::link_wanted: return "link wanted";
        case Event::Kind::link_released: return "link released";
        case Event::Kind::group_failed: return "group failed";
        case Event::Kind::loop_ended: return "loop ended";
    }
    return "?";
}

const char* name_of(GroupFailure::Kind kind) {
    switch (kind) {
        case GroupFailure::Kind::none: return "none";
        case GroupFailure::Kind::lost: return "lost";
        case GroupFailure::Kind::violated: return "violated";
        case GroupFailure::Kind::no_link: return "no link";
        case GroupFailure::Kind::left: return "left";
        case GroupFailure::Kind::overdue: return "overdue";
        case GroupFailure::Kind::desync: return "desync";
        case GroupFailure::Kind::mismatch: return "mismatch";
        case GroupFailure::Kind::abort_received: return "abort received";
        case GroupFailure::Kind::stopped: return "stopped";
        case GroupFailure::Kind::closed: return "closed";
        case GroupFailure::Kind::broke: return "broke";
    }
    return "?";
}

nb::list events(ProgressLoop& loop, double seconds) {
    std::vector<Event> taken;
    {
        const Unlocked unlocked;
        taken = loop.events().take(seconds);
    }
    nb::list named;
    for (const Event& event : taken) {
        named.append(nb::make_tuple(name_of(event.kind), event.id));
    }
    return named;
}

nb::object failure(ProgressLoop& loop) {
    const GroupFailure& failure = loop.failure();
    return nb::make_tuple(
        name_of(failure.kind), failure.rank, failure.text,
        failure.has_operation ? nb::object(nb::cast(failure.operation)) : nb::none(),
        failure.awaited,
        nb::bytes(reinterpret_cast<const char*>(failure.payload.data()), failure.payload.size()),
        failure.number, failure.dtype);
}

// The traffic of the link to `rank` since the last call. Exchanged for 0, so no byte that the loop
// counts meanwhile is lost or counted twice.
nb::tuple take_counters(ProgressLoop& loop, int rank) {
    Counters& counters = loop.counters(rank);
    return nb::make_tuple(counters.bytes_in_shared_memory.exchange(0),
                          counters.bytes_received.exchange(0), counters.bytes_sent.exchange(0),
                          counters.messages_received.exchange(0),
                          counters.messages_sent.exchange(0));
}

}  // namespace

void loop(nb::module_& m) {
    nb::enum_<TlsStatus>(m, "TlsStatus")
        .value("DONE", TlsStatus::done)
        .value("WANTS_READ", TlsStatus::wants_read)
        .value("WANTS_WRITE", TlsStatus::wants_write)
        .value("ENDED", TlsStatus::ended)
        .value("FAILED", TlsStatus::failed)
        .value("REFUSED", TlsStatus::refused)
        .value("DISTRUSTED", TlsStatus::distrusted);

    nb::class_<TlsContext>(m, "TlsContext")
        .def(nb::new_([](const std::string& ca, const std::string& chain, bool is_server,
                         uint64_t records_per_key) {
                 return std::make_shared<TlsContext>(ca, chain, is_server, records_per_key);
             }),
             nb::arg("ca"), nb::arg("chain"), nb::arg("is_server"), nb::arg("records_per_key"));

    nb::class_<Stream>(m, "Stream")
        .def("send",
             [](Stream& stream, nb::handle source) {
                 const Buffer buffer(source, false);
                 size_t taken = 0;
                 without_lock(buffer.size(), [&] {
                     taken = stream.send(static_cast<const uint8_t*>(buffer.data()), buffer.size());
                 });
                 return taken;
             })
        .def("recv_into",
             [](Stream& stream, nb::handle target) {
                 const Buffer buffer(target, true);
                 size_t count = 0;
                 without_lock(buffer.size(), [&] {
                     count = stream.recv(static_cast<uint8_t*>(buffer.data()), buffer.size());
                 });
                 return count;
             })
        .def("flush",
             [](Stream& stream) {
                 without_lock(stream.unsent(), [&] { stream.flush(); });
                 return stream.unsent() == 0;
             })
        .def_prop_ro("is_readable", &Stream::is_readable);

    nb::class_<Killed>(m, "Killed")
        .def(nb::new_([] { return std::make_shared<Killed>(); }))
        .def("set", &Killed::set)
        .def("is_set", &Killed::is_set);

    nb::class_<LocalStream, Stream>(m, "LocalStream")
        .def(nb::new_([](int fd, std::shared_ptr<Killed> killed, std::string peer) {
                 return std::make_shared<LocalStream>(fd, std::move(killed), std::move(peer));
             }),
             nb::arg("fd"), nb::arg("killed"), nb::arg("peer"));

    nb::class_<TlsStream, Stream>(m, "TlsStream")
        .def(nb::new_([](std::shared_ptr<TlsContext> context, int fd, std::string peer) {
                 return std::make_shared<TlsStream>(std::move(context), fd, std::move(peer));
             }),
             nb::arg("context"), nb::arg("fd"), nb::arg("peer"))
        .def("handshake", &TlsStream::handshake, nb::call_guard<Unlocked>())
        .def(
            "read_into",
            [](TlsStream& stream, nb::handle target, size_t count) {
                const Buffer buffer(target, true);
                size_t taken = 0;
                TlsStatus status;
                {
                    const Unlocked unlocked;
                    status = stream.read_some(static_cast<uint8_t*>(buffer.data()),
                                              std::min(count, buffer.size()), taken);
                }
                return nb::make_tuple(status, taken);
            })
        .def("write_all",
             [](TlsStream& stream, nb::handle source) {
                 const Buffer buffer(source, false);
                 const Unlocked unlocked;
                 return stream.write_all(static_cast<const uint8_t*>(buffer.data()), buffer.size());
             })
        .def("take_over", &TlsStream::take_over, nb::arg("peer"))
        .def("pending", &TlsStream::pending)
        .def("peer_certificate",
             [](const TlsStream& stream) {
                 const std::string der = stream.peer_certificate();
                 return nb::bytes(der.data(), der.size());
             })
        .def_prop_ro("num_keys", &TlsStream::num_keys)
        .def_prop_ro("error", &TlsStream::error)
        .def_prop_ro("reason", &TlsStream::reason);

    nb::class_<Ticket>(m, "Ticket")
        .def("wait", &wait, nb::arg("seconds"))
        .def_prop_ro("state",
                     [](Ticket& ticket) {
                         switch (ticket.state()) {
                             case Ticket::State::running: return "running";
                             case Ticket::State::done: return "done";
                             case Ticket::State::refused: return "refused";
                             case Ticket::State::failed: break;
                         }
                         return "failed";
                     })
        .def_prop_ro("seconds", &Ticket::seconds)
        .def_prop_ro("num_beyond", [](Ticket& ticket) { return ticket.num_beyond.load(); })
        .def_prop_ro("source", &Ticket::source);

    nb::class_<CompiledPlan>(m, "CompiledPlan")
        .def(nb::new_(&compile), nb::arg("call"), nb::arg("fingerprint"), nb::arg("channel"),
             nb::arg("dtype"), nb::arg("op"), nb::arg("segment_bytes"), nb::arg("ranks"),
             nb::arg("chunks"), nb::arg("steps"), nb::arg("num_concluded"), nb::arg("divisor"),
             nb::arg("scale"), nb::arg("late_scale"),
             nb::arg("is_computed_by_all"), nb::arg("codec"));

    nb::class_<ProgressLoop>(m, "ProgressLoop")
        .def(nb::new_([](uint32_t epoch, int rank, int world_size, uint64_t segment_bytes,
                         uint64_t max_early_bytes) {
                 return make_for_this_process<ProgressLoop>(
                     ProgressSpec{{epoch, rank, world_size}, segment_bytes, max_early_bytes});
             }),
            nb::arg("epoch"), nb::arg("rank"), nb::arg("world_size"), nb::arg("segment_bytes"),
            nb::arg("max_early_bytes"))
        .def("ticket", &ProgressLoop::ticket)
        .def("start", &start, nb::arg("ticket"), nb::arg("plan"), nb::arg("sequence"),
             nb::arg("deadline"), nb::arg("source").none(), nb::arg("result").none(),
             nb::arg("scratch").none(), nb::arg("narrowed").none(),
             nb::arg("residual").none())
        .def("send", &send)
        .def("receive", &receive)
        .def("leave", &ProgressLoop::leave, nb::arg("channel"), nb::arg("next_sequence"))
        .def("adopt", &adopt)
        .def("no_link", &ProgressLoop::no_link)
        .def("stop", &ProgressLoop::stop)
        .def("close", &ProgressLoop::close)
        .def("join", &ProgressLoop::join, nb::call_guard<Unlocked>())
        .def("set_abort",
             [](ProgressLoop& loop, nb::bytes body, bool has_abort) {
                 const auto* at = static_cast<const uint8_t*>(body.data());
                 loop.set_abort({at, at + body.size()}, has_abort);
             })
        .def("events", &events)
        .def("failure", &failure)
        .def("take_counters", &take_counters);
}

#else

void loop(nb::module_&) {}

#endif

}  // namespace potluck::bind
