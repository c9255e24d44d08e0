// Python binding of the shared-memory engine, for src/potluck/_core/engine/shm. It checks the arrays of a
// call, makes the call's fingerprint, and decides when the interpreter lock (GIL) is released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "bind_array.hpp"
#include "bind_buffer.hpp"
#include "bind_reduction.hpp"
#include "bind_unlocked.hpp"
#include "core/process.hpp"
#include "core/shm/costs.hpp"
#include "core/shm/progress_thread.hpp"
#include "core/shm/queue.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nb = nanobind;

namespace potluck::bind {

namespace {

using shm::Call;
using shm::ProgressThread;
using shm::Kind;
using shm::Notifier;
using shm::now_ns;
using shm::Outcome;
using shm::Queue;
using shm::Shape;
using shm::PendingCall;

// The bits of a fingerprint that are a hash, and the largest number of elements it tells.
constexpr std::uint64_t HASH = (1 << 24) - 1;
constexpr std::uint64_t MANY = (1 << 23) - 1;
// The longest timeout, 11 days: added to now_ns() it does not overflow, as infinity would.
constexpr std::int64_t MAX_NS = 1'000'000'000'000'000;
// What the notifier gives for a failed call whose caller was interrupted before.
constexpr std::uint64_t ABANDONED_ID = ~std::uint64_t{0};
// How often a blocked caller takes the interpreter lock to handle signals (Ctrl-C).
constexpr std::int64_t SIGNALS_NS = 100'000'000;

std::int64_t in_ns(double seconds) {
    const double ns = std::min(seconds * 1e9, static_cast<double>(MAX_NS));
    return static_cast<std::int64_t>(std::max(0.0, ns));
}

shm::Combination combination_of(int dtype, int op) {
    return {static_cast<Dtype>(dtype), reductions[op].op, reductions[op].is_mean};
}

bool combines(Kind kind) {
    return kind == Kind::ALL_REDUCE || kind == Kind::REDUCE || kind == Kind::REDUCE_SCATTER;
}

std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {
    hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
    hash *= 0xff51afd7ed558ccdull;
    return hash ^ hash >> 32;
}

// A second mapping of shared memory that Python has mapped. It belongs to the channel: Python may
// close its own mapping, and the descriptor, while native threads still use the memory.
class Mapping {
public:
    explicit Mapping(nb::handle memory) {
#if defined(__linux__)
        const Buffer buffer(memory, true);
        size_ = buffer.size();
        // With an old size of 0 mremap(2) makes a second mapping of the same shared pages.
        at_ = mremap(buffer.data(), 0, size_, MREMAP_MAYMOVE);
        if (at_ == MAP_FAILED) throw nb::value_error("the memory is not shared");
        // A forked child has no part in it, nor keeps it alive.
        madvise(at_, size_, MADV_DONTFORK);
#else
        buffer_ = std::make_unique<Buffer>(memory, true);
        at_ = buffer_->data();
        size_ = buffer_->size();
#endif
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
#if defined(__linux__)
        if (here_) munmap(at_, size_);
#else
        const nb::gil_scoped_acquire hold;  // any thread may drop the last reference
        buffer_.reset();
#endif
    }

    void* data() const { return at_; }
    std::size_t size() const { return size_; }

private:
    void* at_ = nullptr;
    std::size_t size_ = 0;
    const MadeHere here_;
#if !defined(__linux__)
    std::unique_ptr<Buffer> buffer_;
#endif
};

// -- the classes

// Why a call failed: the outcome, the rank at fault (-1: none in particular), whether that rank has
// begun the call too, and after DESYNC the fingerprint of that rank's call.
using Failure = std::tuple<const char*, int, bool, std::uint64_t>;

std::optional<Failure> failure_of(const PendingCall& pending) {
    static constexpr const char* names[] = {"done",   "pending", "stopped", "timeout",
                                            "desync", "left",    "closed"};
    if (pending.outcome == Outcome::DONE) return std::nullopt;
    return Failure{names[static_cast<int>(pending.outcome)], pending.faulty_rank, pending.has_begun,
                   pending.peer_fingerprint};
}

// `operations` and `reductions` are Python's, in the order in which fingerprints count them.
struct PyEngine {
    std::shared_ptr<ProgressThread> progress_thread = make_for_this_process<ProgressThread>();
    std::shared_ptr<Notifier> notifier = make_for_this_process<Notifier>();
    std::vector<nb::object> operations;
    const MadeHere here;

    PyEngine(const nb::sequence& given_operations, const nb::sequence& given_reductions) {
        int number = 0;
        for (nb::handle each : given_reductions) {
            if (reduction_of(each) != number++) {
                throw nb::value_error("reductions in another order");
            }
        }
        for (nb::handle each : given_operations) {
            const std::size_t kind = operations.size();
            if (kind >= shm::NUM_KINDS || !PyUnicode_Check(each.ptr()) ||
                PyUnicode_CompareWithASCIIString(each.ptr(), shm::KIND_NAMES[kind]) != 0) {
                throw nb::value_error("operations in another order");
            }
            operations.push_back(nb::borrow(each));
        }
        if (number != num_reductions || operations.size() != shm::NUM_KINDS) {
            throw nb::value_error("some reductions or operations are missing");
        }
    }

    ~PyEngine() { close(); }

    void close() {
        if (!here) return;
        const Unlocked unlocked;
        progress_thread->close();
        notifier->close();
    }
    std::uint64_t next_ended() {
        const Unlocked unlocked;
        return notifier->next();
    }
};

// A call under way. The thread that waits for a call moves it, so it keeps the queue, with the
// channel's memory, even if Python has dropped the channel.
class PyCall {
public:
    PyCall(std::shared_ptr<Queue> queue, std::shared_ptr<PendingCall> pending)
        : queue_(std::move(queue)), pending_(std::move(pending)) {}

    bool done() const { return pending_->is_done(); }
    std::optional<Failure> failure() const { return failure_of(*pending_); }
    bool watch() { return pending_->watch(); }

    // False after `seconds`, and in a forked child: a signal handler may have forked.
    bool wait(double seconds) {
        const MadeHere here;
        const std::int64_t until = now_ns() + in_ns(seconds);
        while (!pending_->is_done()) {
            const std::int64_t now = now_ns();
            if (now >= until) return false;
            {
                const Unlocked unlocked;
                queue_->wait(pending_, std::min(until, now + SIGNALS_NS));
            }
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (!here) return false;
        }
        return true;
    }

private:
    std::shared_ptr<Queue> queue_;
    std::shared_ptr<PendingCall> pending_;
};

class PyChannel {
public:
    PyChannel(nb::handle memory, int rank, int world, int num_slots, std::size_t slot_bytes,
             std::size_t small_bytes, double spin_s, std::uint64_t salt, std::uint64_t sequence,
             const PyEngine& engine, nb::object error_of)
        : operations_(engine.operations), error_of_(std::move(error_of)),
          progress_thread_(engine.progress_thread), salt_(salt), sequence_(sequence) {
        const auto mapping = std::make_shared<Mapping>(memory);
        const Shape shape{world, num_slots, slot_bytes, std::min(small_bytes, slot_bytes)};
        if (world < 2 || world > shm::MAX_WORLD || rank < 0 || rank >= world ||
            num_slots < 4 || slot_bytes < 4096 || slot_bytes % shm::LINE != 0 ||
            mapping->size() < shape.total_bytes()) {
            throw nb::value_error("this memory is too small for so many ranks");
        }
        const auto spin_ns = static_cast<std::int64_t>(spin_s * 1e9);
        queue_ = make_for_this_process<Queue>(std::shared_ptr<void>(mapping, mapping->data()),
                                              shape, rank, spin_ns, engine.progress_thread,
                                              engine.notifier);
        progress_thread_->serve(queue_);
    }
    ~PyChannel() { close(); }

    // This channel's calls have ended, and it gets no more. The memory is unmapped with the last
    // reference to the queue.
    void close() {
        if (!here_) return;
        const Unlocked unlocked;
        progress_thread_->forget(queue_);
    }

    std::uint64_t take_sequence() { return sequence_++; }

    // Run a blocking call in this thread. Returns False if the fast path can't take the call;
    // nothing was done then, and the caller goes the usual way, which also explains what is wrong
    // with the arguments. So it does in a forked child, where the usual way raises. Raises what `error_of` makes of a failure. `source` and `result` are
    // arrays (bind_array.hpp), or None where this rank has none; `is_flat`: both count as arrays of
    // one dimension.
    bool fast_path(nb::handle operation, nb::handle source, nb::handle result, nb::handle op,
                   int root, double timeout_s, bool is_flat) {
        std::optional<Failure> failure;
        if (!run_now(operation, source, result, op, root, timeout_s, is_flat, failure)) {
            return false;
        }
        if (failure) {
            const nb::object error = error_of_(operation, source, result, op, root, *failure);
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
            throw nb::python_error();
        }
        return true;
    }

    // Begin a call whose sequence number was taken. The arrays are given by address: Python keeps
    // them until the call has ended (SharedMemoryWork.keep).
    PyCall start(nb::handle operation, int dtype, nb::handle op_name, int root,
                 const std::vector<std::int64_t>& dims, std::uintptr_t source,
                 std::uintptr_t result, std::uint64_t sequence, double timeout_s,
                 std::uint64_t id) {
        const int place = place_of(operation);
        if (place == shm::NUM_KINDS) throw nb::value_error("no such operation");
        const auto kind = static_cast<Kind>(place);
        const int op = combines(kind) ? reduction_of(op_name) : 0;
        if (op < 0) throw nb::value_error("no such reduction");
        Call call = call_of(kind, dtype, op, root, dims.data(), static_cast<int>(dims.size()));
        call.source = reinterpret_cast<const char*>(source);
        call.result = reinterpret_cast<char*>(result);
        stamp(call, sequence);
        const int parts = kind == Kind::ALL_TO_ALL ? queue_->channel.shape.world : 1;
        const std::size_t nbytes = call.count * call.itemsize * static_cast<std::size_t>(parts);
        auto pending = std::make_shared<PendingCall>(call, in_ns(timeout_s), nbytes, id);
        queue_->submit(pending);
        return {queue_, std::move(pending)};
    }

    bool can_combine(int dtype, nb::handle op) const {
        const int number = reduction_of(op);
        return number >= 0 && has_combination(combination_of(dtype, number));
    }
    void note_link_call(std::uint64_t sequence, std::uint64_t fingerprint) {
        queue_->channel.note_link_call(sequence, fingerprint);
    }
    // A failed call whose caller was interrupted before it ended, returned once; None if there is
    // none.
    std::optional<std::tuple<nb::object, Failure>> abandoned_failure() {
        for (auto each = abandoned_.begin(); each != abandoned_.end(); ++each) {
            const PendingCall& pending = *std::get<0>(*each);
            if (!pending.is_done() || needs_no_report(pending)) continue;
            const auto kind = static_cast<std::size_t>(pending.running.call().kind);
            const std::tuple<nb::object, Failure> found{operations_[kind], *failure_of(pending)};
            abandoned_.erase(each);
            return found;
        }
        return std::nullopt;
    }
    std::int64_t ongoing() { return queue_->ongoing(); }
    void stop(bool for_all) {
        const Unlocked unlocked;
        queue_->stop(for_all);
    }
    void leave() {
        const Unlocked unlocked;
        queue_->leave();
    }
    void leave_channel() {
        const Unlocked unlocked;
        queue_->leave_channel();
    }
    // End the calls that still wait once the progress thread has ended (the channel is stopped).
    void drain() {
        const Unlocked unlocked;
        std::int64_t until = 0;
        queue_->poll(nullptr, &until);
    }
    double waited_s() const { return static_cast<double>(queue_->blocked_ns()) / 1e9; }
    // By kind: calls by bucket of seconds and of bytes, and the sums of seconds and bytes.
    nb::list stats() const {
        nb::list rows;
        for (int kind = 0; kind < shm::NUM_KINDS; ++kind) {
            const shm::Stats& stats = queue_->stats(static_cast<Kind>(kind));
            nb::list seconds, bytes;
            for (const auto& each : stats.seconds) seconds.append(each.get());
            for (const auto& each : stats.bytes) bytes.append(each.get());
            rows.append(nb::make_tuple(seconds, bytes,
                                       static_cast<double>(stats.total_ns.get()) / 1e9,
                                       stats.total_bytes.get()));
        }
        return rows;
    }

private:
    int place_of(nb::handle operation) const {
        int place = 0;
        const auto is_at = [&](int at) {
            return operations_[static_cast<std::size_t>(at)].is(operation);
        };
        while (place < shm::NUM_KINDS && !is_at(place)) ++place;
        return place;
    }

    // `fast_path`, with `failure` returned instead of raised.
    bool run_now(nb::handle operation, nb::handle source, nb::handle result, nb::handle op_name,
                 int root, double timeout_s, bool is_flat, std::optional<Failure>& failure) {
        const int rank = queue_->channel.rank, world = queue_->channel.shape.world;
        if (!here_) return false;
        const int place = place_of(operation);
        if (place == shm::NUM_KINDS) return false;
        if (root < 0 || root >= world || !(timeout_s > 0)) return false;
        const auto kind = static_cast<Kind>(place);
        const int op = combines(kind) ? reduction_of(op_name) : 0;
        if (op < 0) return false;
        if (kind == Kind::BARRIER) {
            const std::int64_t nothing[] = {0};
            Call call = call_of(kind, static_cast<int>(Dtype::uint8), op, root, nothing, 1);
            return run(call, 0, 0, timeout_s, source, result, failure);
        }
        // An array is given exactly where this rank has one.
        const bool is_root = rank == root;
        const bool has_source = !source.is_none(), has_result = !result.is_none();
        const bool needs_source = kind != Kind::SCATTER || is_root;
        const bool needs_result = (kind != Kind::GATHER && kind != Kind::REDUCE) || is_root;
        if (needs_source != has_source || needs_result != has_result) return false;
        const bool is_one = source.is(result);
        if (kind == Kind::BROADCAST && !is_one) return false;
        const bool writes_source = is_one && (kind != Kind::BROADCAST || !is_root);
        Array from, to;
        if (has_source && !from.describe(source, writes_source)) return false;
        if (has_result && !is_one && !to.describe(result, true)) return false;
        const Array& into = is_one ? from : to;
        if (has_source && has_result && from.dtype() != into.dtype()) return false;
        // A part comes from each rank, or goes to each.
        const auto parts = static_cast<std::size_t>(world);
        const bool spreads = kind == Kind::REDUCE_SCATTER || kind == Kind::SCATTER;
        const bool collects = kind == Kind::ALL_GATHER || kind == Kind::GATHER;
        const bool has_rows = spreads || kind == Kind::ALL_TO_ALL;
        if (has_rows && has_source && !is_flat && (from.ndim() == 0 || from.dims()[0] != world)) {
            return false;
        }
        if (has_source && has_result) {
            if (spreads && from.count() != parts * into.count()) return false;
            if (collects && into.count() != parts * from.count()) return false;
            if (!spreads && !collects && from.count() != into.count()) return false;
            if (is_one ? kind == Kind::ALL_TO_ALL : may_overwrite_source(from, into, kind)) {
                return false;
            }
        }
        const Array& described = spreads ? into : from;
        if (kind == Kind::ALL_TO_ALL && described.count() % parts != 0) return false;
        if (combines(kind) && !has_combination(combination_of(described.dtype(), op))) {
            return false;
        }
        const auto count = static_cast<std::int64_t>(described.count());
        const std::int64_t* dims = described.dims();
        int ndim = described.ndim();
        if (is_flat) {
            dims = &count;
            ndim = 1;
        } else if (kind == Kind::REDUCE_SCATTER) {
            // The shape in the fingerprint is one row of the source. The result may have any shape
            // with as many elements, and a different one on each rank.
            dims = from.dims() + 1;
            ndim = from.ndim() - 1;
        }
        Call call = call_of(kind, described.dtype(), op, root, dims, ndim);
        call.source = from.data();
        call.result = into.data();
        const std::size_t most = std::max(from.bytes(), into.bytes());
        const std::size_t moved = combines(kind) && !spreads ? parts * most : most;
        return run(call, described.bytes(), moved, timeout_s, source, result, failure);
    }

    // Whether a result could be written over a part of the source that is still to be read: the
    // arrays overlap, and neither is the smaller one this rank's part of the larger (in place), nor
    // are they the same array of an operation that can work in place.
    bool may_overwrite_source(const Array& from, const Array& into, Kind kind) const {
        const auto a = reinterpret_cast<std::uintptr_t>(from.data());
        const auto b = reinterpret_cast<std::uintptr_t>(into.data());
        const std::size_t given = from.bytes(), got = into.bytes();
        if (given == 0 || got == 0 || a + given <= b || b + got <= a) return false;
        const auto rank = static_cast<std::size_t>(queue_->channel.rank);
        if (given < got) return a != b + rank * given;
        if (got < given) return b != a + rank * got;
        return a != b || kind == Kind::ALL_TO_ALL;
    }

    // Whether an abandoned call needs no report: it succeeded, or ended with the group, whose
    // failure is reported anyway.
    static bool needs_no_report(const PendingCall& pending) {
        return pending.outcome == Outcome::DONE || pending.outcome == Outcome::STOPPED;
    }

    Call call_of(Kind kind, int dtype, int op, int root, const std::int64_t* dims,
                 int ndim) const {
        Call call;
        call.kind = kind;
        call.combination = combination_of(dtype, op);
        call.root = root;
        call.itemsize = item_bytes(static_cast<Dtype>(dtype));
        call.count = 1;
        const std::int64_t word = kind_word(kind, dtype, op, root);
        std::uint64_t hash = mixed(salt_, static_cast<std::uint64_t>(word));
        for (int i = 0; i < ndim; ++i) {
            call.count *= static_cast<std::size_t>(dims[i]);
            hash = mixed(hash, static_cast<std::uint64_t>(dims[i]));
        }
        hash = mixed(hash, static_cast<std::uint64_t>(ndim));
        call.fingerprint = description(kind, dtype, op, call.count) | (hash & HASH);
        if (kind == Kind::ALL_TO_ALL) {
            call.count /= static_cast<std::size_t>(queue_->channel.shape.world);
        }
        return call;
    }

    // The upper bits of the fingerprint, as src/potluck/_core/engine/fingerprint.py lays them out.
    static std::uint64_t description(Kind kind, int dtype, int op, std::size_t count) {
        constexpr std::uint64_t algorithm = 7;  // shared memory
        const auto operation = static_cast<std::uint64_t>(kind) + 1;
        const std::uint64_t reduction = combines(kind) ? static_cast<std::uint64_t>(op) + 1 : 0;
        return operation << 60 | static_cast<std::uint64_t>(dtype) << 56 | reduction << 52 |
               algorithm << 47 | std::min<std::uint64_t>(count, MANY) << 24;
    }

    static std::int64_t kind_word(Kind kind, int dtype, int op, int root) {
        const int what = combines(kind) ? op + 1 : 0;
        return static_cast<std::int64_t>(kind) | dtype << 8 | what << 16 |
               static_cast<std::int64_t>(root) << 32;
    }

    static void stamp(Call& call, std::uint64_t sequence) {
        call.sequence = sequence;
        const std::uint64_t hash = mixed(call.fingerprint, sequence) & HASH;
        call.fingerprint = (call.fingerprint & ~HASH) | hash;
    }

    // `moved`: bytes that this rank reads or writes in the call. A small call keeps the interpreter
    // lock while it can progress at once: to release the lock and take it again would cost more.
    bool run(Call& call, std::size_t nbytes, std::size_t moved, double timeout_s,
             nb::handle source, nb::handle result, std::optional<Failure>& failure) {
        if (!queue_->reserve()) return false;
        stamp(call, sequence_++);
        PendingCall pending(call, in_ns(timeout_s), nbytes, ABANDONED_ID);
        Outcome outcome = moved < WORTH_UNLOCKING ? queue_->try_run(pending) : Outcome::PENDING;
        for (std::int64_t until = pending.began_ns + SIGNALS_NS; outcome == Outcome::PENDING;
             until += SIGNALS_NS) {
            {
                const Unlocked unlocked;
                outcome = queue_->run(pending, until);
            }
            if (outcome != Outcome::PENDING) break;
            const bool is_interrupted = PyErr_CheckSignals() != 0;
            if (!here_) {  // a signal handler has forked, and this is the child
                if (is_interrupted) throw nb::python_error();
                return false;
            }
            if (is_interrupted) {
                // The other ranks need this rank's part, so the call goes on without its caller, on
                // the progress thread. The arrays are kept until it has ended: the caller may drop
                // its references when the exception reaches it.
                auto abandoned = std::make_shared<PendingCall>(pending);
                abandoned_.emplace_back(abandoned, nb::borrow(source), nb::borrow(result));
                queue_->hand_over(std::move(abandoned));
                throw nb::python_error();
            }
        }
        if (outcome != Outcome::DONE) failure = failure_of(pending);
        if (!abandoned_.empty()) {
            std::erase_if(abandoned_, [](const auto& each) {
                return std::get<0>(each)->is_done() && needs_no_report(*std::get<0>(each));
            });
        }
        return true;
    }

    // The members of Python's Operation, in the order of Kind: compared by identity, not by text.
    std::vector<nb::object> operations_;
    nb::object error_of_;
    std::shared_ptr<ProgressThread> progress_thread_;
    std::shared_ptr<Queue> queue_;
    const MadeHere here_;
    std::uint64_t salt_;
    std::uint64_t sequence_;
    // Calls whose callers were interrupted, and their arrays.
    std::vector<std::tuple<std::shared_ptr<PendingCall>, nb::object, nb::object>> abandoned_;
};

std::size_t shm_bytes(int world, int num_slots, std::size_t slot_bytes) {
    return Shape{world, num_slots, slot_bytes, 0}.total_bytes();
}

}  // namespace

void shared_memory(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<PyEngine>(m, "ShmEngine")
        .def(nb::init<const nb::sequence&, const nb::sequence&>(), "operations"_a, "reductions"_a)
        .def("close", &PyEngine::close)
        .def("next_ended", &PyEngine::next_ended);
    nb::class_<PyCall>(m, "ShmCall")
        .def_prop_ro("done", &PyCall::done)
        .def("failure", &PyCall::failure)
        .def("wait", &PyCall::wait, "seconds"_a)
        .def("watch", &PyCall::watch);
    nb::class_<PyChannel>(m, "ShmChannel")
        .def(nb::init<nb::handle, int, int, int, std::size_t, std::size_t, double, std::uint64_t,
                      std::uint64_t, const PyEngine&, nb::object>(),
             "memory"_a, "rank"_a, "world"_a, "num_slots"_a, "slot_bytes"_a, "small_bytes"_a,
             "spin_s"_a, "salt"_a, "sequence"_a, "engine"_a, "error_of"_a)
        .def("take_sequence", &PyChannel::take_sequence)
        .def("fast_path", &PyChannel::fast_path, nb::arg(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg(), nb::arg(), nb::arg())
        .def("start", &PyChannel::start, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("can_combine", &PyChannel::can_combine, "dtype"_a, "op"_a)
        .def("note_link_call", &PyChannel::note_link_call, "sequence"_a, "fingerprint"_a)
        .def("abandoned_failure", &PyChannel::abandoned_failure)
        .def("ongoing", &PyChannel::ongoing)
        .def("stop", &PyChannel::stop, "for_all"_a)
        .def("leave", &PyChannel::leave)
        .def("leave_channel", &PyChannel::leave_channel)
        .def("close", &PyChannel::close)
        .def("drain", &PyChannel::drain)
        .def("waited_s", &PyChannel::waited_s)
        .def("stats", &PyChannel::stats);
    m.def("shm_bytes", shm_bytes, "world"_a, "num_slots"_a, "slot_bytes"_a);
    m.def("shm_costs", [] {
        const Unlocked unlocked;
        const shm::Costs costs = shm::measure_costs();
        return std::make_tuple(costs.wait_s, costs.turn_s, costs.wake_s, costs.byte_s);
    });
}

}  // namespace potluck::bind
