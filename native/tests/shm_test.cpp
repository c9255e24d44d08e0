// Tests of the shared-memory engine without Python: a process per rank, every kind of call, lengths
// at and around the block sizes, random programs, different calls, kills.
//
//     shm_test                      all checks, for worlds of 2, 3 and 5
//     shm_test bench WORLD BYTES    the time of one all_reduce, in microseconds
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/shm/progress_thread.hpp"
#include "core/shm/queue.hpp"

using namespace potluck::shm;

namespace {

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            std::_Exit(1);                                                            \
        }                                                                             \
    } while (false)

constexpr std::int64_t SECOND = 1'000'000'000;

// Shared memory for one world, freed with the last process that maps it.
struct Memory {
    explicit Memory(const Shape& shape) : shape(shape) {
        void* const mapped = mmap(nullptr, shape.total_bytes(), PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(mapped != MAP_FAILED);
        const std::size_t size = shape.total_bytes();
        at = std::shared_ptr<void>(mapped, [size](void* begin) { munmap(begin, size); });
    }
    Shape shape;
    std::shared_ptr<void> at;
};

// One rank of a world, with its progress thread.
struct Rank {
    Rank(const Memory& memory, int rank, std::int64_t spin_ns)
        : progress_thread(std::make_shared<ProgressThread>()),
          notifier(std::make_shared<Notifier>()),
          queue(std::make_shared<Queue>(memory.at, memory.shape, rank, spin_ns,
                                        progress_thread, notifier)),
          world(memory.shape.world),
          rank(rank) {
        progress_thread->serve(queue);
    }
    ~Rank() { progress_thread->close(); }

    Call call(Kind kind, const float* source, float* result, std::size_t count, int root = 0) {
        Call made;
        made.kind = kind;
        made.combination = {potluck::Dtype::float32, potluck::Op::sum, false};
        made.root = root;
        made.source = reinterpret_cast<const char*>(source);
        made.result = reinterpret_cast<char*>(result);
        made.count = count;
        made.itemsize = sizeof(float);
        made.sequence = number;
        made.fingerprint = 1000 * number++ + static_cast<std::uint64_t>(kind) + count + 1;
        return made;
    }
    Outcome run(const Call& made, std::int64_t patience = 20 * SECOND) {
        last = std::make_unique<PendingCall>(made, patience, made.count * 4);
        if (!queue->reserve()) return Outcome::PENDING;
        const Outcome outcome = number % 2 != 0 ? queue->try_run(*last) : Outcome::PENDING;
        return outcome != Outcome::PENDING ? outcome : queue->run(*last, last->deadline_ns());
    }

    std::shared_ptr<ProgressThread> progress_thread;
    std::shared_ptr<Notifier> notifier;
    std::shared_ptr<Queue> queue;
    std::unique_ptr<PendingCall> last;
    int world, rank;
    std::uint64_t number = 0;
};

// Run `body(rank)` in a process per rank; each must exit with 0, except those in `killed`.
template <typename Body>
void in_processes(int world, Body body, const std::vector<int>& killed = {}) {
    std::vector<pid_t> children;
    for (int rank = 0; rank < world; ++rank) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(60);
            body(rank);
            std::_Exit(0);
        }
        children.push_back(child);
    }
    for (int rank = 0; rank < world; ++rank) {
        int status = 0;
        CHECK(waitpid(children[static_cast<std::size_t>(rank)], &status, 0) > 0);
        bool may_die = false;
        for (const int each : killed) may_die = may_die || each == rank;
        CHECK(may_die || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
    }
}

// The element that rank `rank` contributes: small whole numbers, so that sums are exact.
float value(int rank, std::size_t index, std::uint64_t salt) {
    return static_cast<float>((index * 7 + salt * 3 + static_cast<std::size_t>(rank) * 11) % 64);
}

std::vector<float> contribution(int rank, std::size_t count, std::uint64_t salt) {
    std::vector<float> data(count + 1);  // used from its second element: not aligned to a vector
    for (std::size_t i = 0; i < count; ++i) data[i + 1] = value(rank, i, salt);
    return data;
}

float total(int world, std::size_t index, std::uint64_t salt) {
    float sum = 0;
    for (int rank = 0; rank < world; ++rank) sum += value(rank, index, salt);
    return sum;
}

// Make one call of `kind`, blocking or submitted, and check its result.
void check_call(Rank& me, Kind kind, std::size_t count, int root, bool is_async) {
    const auto world = static_cast<std::size_t>(me.world);
    const std::uint64_t salt = me.number;
    const bool is_root = me.rank == root;
    const bool has_parts = kind == Kind::REDUCE_SCATTER || kind == Kind::ALL_TO_ALL ||
                           kind == Kind::SCATTER;
    const bool gathers = kind == Kind::ALL_GATHER || kind == Kind::GATHER || kind == Kind::ALL_TO_ALL;
    auto source = contribution(me.rank, has_parts ? count * world : count, salt);
    std::vector<float> result(gathers ? count * world : count, -1.0f);
    const bool in_place =
        kind == Kind::ALL_REDUCE || kind == Kind::BROADCAST || kind == Kind::REDUCE;
    float* target = in_place ? source.data() + 1 : result.data();
    const Call call = me.call(kind, source.data() + 1, target, count, root);
    if (is_async || me.run(call) == Outcome::PENDING) {
        auto pending = std::make_shared<PendingCall>(call, 20 * SECOND, count * 4, 1);
        me.queue->submit(pending);
        CHECK(me.queue->wait(pending, now_ns() + 30 * SECOND));
        CHECK(pending->outcome == Outcome::DONE);
    } else {
        CHECK(me.last->outcome == Outcome::DONE);
    }
    for (std::size_t i = 0; i < count; ++i) {
        const auto mine = static_cast<std::size_t>(me.rank) * count + i;
        switch (kind) {
            case Kind::ALL_REDUCE: CHECK(target[i] == total(me.world, i, salt)); break;
            case Kind::REDUCE:
                CHECK(target[i] == (is_root ? total(me.world, i, salt) : value(me.rank, i, salt)));
                break;
            case Kind::BROADCAST: CHECK(target[i] == value(root, i, salt)); break;
            case Kind::REDUCE_SCATTER: CHECK(target[i] == total(me.world, mine, salt)); break;
            case Kind::SCATTER: CHECK(target[i] == value(root, mine, salt)); break;
            case Kind::GATHER:
                if (!is_root) break;
                [[fallthrough]];
            case Kind::ALL_GATHER:
                for (std::size_t r = 0; r < world; ++r) {
                    CHECK(target[r * count + i] == value(static_cast<int>(r), i, salt));
                }
                break;
            case Kind::ALL_TO_ALL:
                for (std::size_t r = 0; r < world; ++r) {
                    CHECK(target[r * count + i] == value(static_cast<int>(r), mine, salt));
                }
                break;
            case Kind::BARRIER: break;
        }
    }
}

Shape shape_of(int world, std::size_t slot_bytes = 16 * 1024) {
    return {world, 4, slot_bytes, slot_bytes / 2};
}

void check_kinds(int world) {
    const Memory memory(shape_of(world));
    in_processes(world, [&](int rank) {
        Rank me(memory, rank, 20'000);
        for (const std::size_t count : {0ul, 1ul, 2ul, 17ul, 1000ul, 4096ul, 5000ul, 70'001ul}) {
            for (int kind = 0; kind < NUM_KINDS; ++kind) {
                for (const int root : {0, world - 1}) {
                    check_call(me, static_cast<Kind>(kind), count, root, false);
                    check_call(me, static_cast<Kind>(kind), count, root, true);
                }
            }
        }
    });
}

// Results larger than the caches, and broadcasts of more blocks than all ranks have slots together.
void check_large(int world) {
    const Memory memory(shape_of(world, 64 * 1024));
    in_processes(world, [&](int rank) {
        Rank me(memory, rank, 2'000);
        for (const auto kind : {Kind::BROADCAST, Kind::ALL_GATHER, Kind::GATHER, Kind::ALL_TO_ALL,
                                Kind::SCATTER, Kind::BARRIER, Kind::BROADCAST}) {
            check_call(me, kind, kind == Kind::BROADCAST ? 4'500'003 : 1'500'001, world - 1, false);
        }
    });
}

// A random sequence of calls, the same on all ranks, with different pauses on each.
void check_programs(int world, unsigned seed) {
    const Memory memory(shape_of(world, 4096));
    in_processes(world, [&](int rank) {
        Rank me(memory, rank, rank % 2 ? 0 : 5'000);
        std::mt19937 program(seed), own(seed * 100 + static_cast<unsigned>(rank));
        for (int i = 0; i < 2000; ++i) {
            const auto kind = static_cast<Kind>(program() % NUM_KINDS);
            const std::size_t count = program() % 3 ? program() % 200 : program() % 5000;
            const int root = static_cast<int>(program() % static_cast<unsigned>(world));
            if (own() % 64 == 0) std::this_thread::yield();
            check_call(me, kind, count, root, own() % 4 == 0);
        }
    });
}

void check_disagreement() {
    const Memory memory(shape_of(3));
    in_processes(3, [&](int rank) {
        Rank me(memory, rank, 1000);
        std::vector<float> data(100, 1.0f);
        CHECK(me.run(me.call(Kind::ALL_REDUCE, data.data(), data.data(), 100)) == Outcome::DONE);
        const std::size_t count = rank == 1 ? 99 : 100;
        const Outcome outcome =
            me.run(me.call(Kind::ALL_REDUCE, data.data(), data.data(), count));
        CHECK(outcome == Outcome::DESYNC || outcome == Outcome::STOPPED);
        CHECK(data[0] == 3.0f);
        CHECK(me.run(me.call(Kind::BARRIER, nullptr, nullptr, 0)) == Outcome::STOPPED);
    });
}

void check_absence() {
    const Memory memory(shape_of(3));
    in_processes(3, [&](int rank) {
        Rank me(memory, rank, 1000);
        CHECK(me.run(me.call(Kind::BARRIER, nullptr, nullptr, 0)) == Outcome::DONE);
        if (rank == 2) return;
        const std::int64_t began = now_ns();
        const Outcome outcome =
            me.run(me.call(Kind::BARRIER, nullptr, nullptr, 0), SECOND / 5);
        CHECK(now_ns() - began < 10 * SECOND);
        CHECK(outcome == Outcome::TIMEOUT || outcome == Outcome::STOPPED);
        if (outcome == Outcome::TIMEOUT) CHECK(me.last->faulty_rank == 2 && !me.last->has_begun);
    });
    const Memory another(shape_of(2));
    in_processes(2, [&](int rank) {
        Rank me(another, rank, 1000);
        CHECK(me.run(me.call(Kind::BARRIER, nullptr, nullptr, 0)) == Outcome::DONE);
        if (rank == 1) {
            me.queue->leave();
            return;
        }
        CHECK(me.run(me.call(Kind::BARRIER, nullptr, nullptr, 0)) == Outcome::LEFT);
        CHECK(me.last->faulty_rank == 1);
    });
}

// A rank is killed at a random moment; a rank that sees the death stops the channel for all.
void check_kill(int world, unsigned seed) {
    const Memory memory(shape_of(world, 4096));
    const int victim = static_cast<int>(seed) % world;
    auto* const pid = static_cast<std::atomic<pid_t>*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    in_processes(
        world,
        [&](int rank) {
            Rank me(memory, rank, 2000);
            if (rank == victim) pid->store(getpid());
            std::thread killer;
            if (rank == (victim + 1) % world) {
                killer = std::thread([&] {
                    while (pid->load() == 0) std::this_thread::yield();
                    std::this_thread::sleep_for(std::chrono::microseconds(300 + seed * 37));
                    kill(pid->load(), SIGKILL);
                    me.queue->stop(true);
                });
            }
            std::vector<float> data(5000, 1.0f);
            Outcome outcome = Outcome::DONE;
            while (outcome == Outcome::DONE) {
                outcome = me.run(me.call(Kind::ALL_REDUCE, data.data(), data.data(), 5000));
            }
            CHECK(outcome == Outcome::STOPPED);
            if (killer.joinable()) killer.join();
        },
        {victim});
    munmap(pid, 4096);
}

// Two channels, used in opposite order by the two ranks: without the progress threads, which serve
// both channels, the ranks would wait for each other (deadlock).
void check_two_channels() {
    const Memory first(shape_of(2)), second(shape_of(2));
    in_processes(2, [&](int rank) {
        Rank one(first, rank, 1000);
        auto other = std::make_shared<Queue>(second.at, second.shape, rank, 1000, one.progress_thread,
                                             one.notifier);
        one.progress_thread->serve(other);
        for (int round = 0; round < 200; ++round) {
            std::vector<float> a(3000, 1.0f), b(3000, 2.0f);
            const auto pending = [&](std::vector<float>& data) {
                Call call = one.call(Kind::ALL_REDUCE, data.data(), data.data(), data.size());
                call.sequence = call.fingerprint = static_cast<std::uint64_t>(round);
                return std::make_shared<PendingCall>(call, 20 * SECOND, 1, 1);
            };
            auto x = pending(a), y = pending(b);
            if (rank == 0) {
                one.queue->submit(x);
                CHECK(one.queue->wait(x, now_ns() + 30 * SECOND) || true);
                other->submit(y);
            } else {
                other->submit(y);
                one.queue->submit(x);
            }
            CHECK(other->wait(y, now_ns() + 30 * SECOND));
            CHECK(one.queue->wait(x, now_ns() + 30 * SECOND));
            CHECK(a[7] == 2.0f && b[7] == 4.0f);
        }
    });
}

// Channels that are left amid their calls, on a progress thread that goes on. The last reference to
// the memory is the queue's: nothing may touch it after the queue is gone.
void check_left_channels() {
    std::vector<std::unique_ptr<Memory>> memories;
    for (int i = 0; i < 100; ++i) memories.push_back(std::make_unique<Memory>(shape_of(2, 4096)));
    const Memory whole(shape_of(2));
    in_processes(2, [&](int rank) {
        Rank group(whole, rank, 1000);
        std::mt19937 own(static_cast<unsigned>(rank));
        for (auto& memory : memories) {
            auto part = std::make_shared<Queue>(memory->at, memory->shape, rank, 1000,
                                                group.progress_thread, group.notifier);
            group.progress_thread->serve(part);
            memory.reset();
            std::vector<float> data(3000, 1.0f), other(3000, 2.0f);
            const auto submit = [&](std::vector<float>& values, std::uint64_t number) {
                Call call = group.call(Kind::ALL_REDUCE, values.data(), values.data(), 3000);
                call.sequence = call.fingerprint = number;
                auto pending = std::make_shared<PendingCall>(call, 20 * SECOND, 1, 1);
                part->submit(pending);
                return pending;
            };
            const auto first = submit(data, 1), second = submit(other, 2);
            part->leave_channel();
            CHECK(!part->reserve());
            check_call(group, Kind::BARRIER, 0, 0, own() % 2 == 0);
            CHECK(part->wait(second, now_ns() + 30 * SECOND) && first->is_done());
            CHECK(first->outcome == Outcome::DONE && second->outcome == Outcome::DONE);
            CHECK(data[7] == 2.0f && other[7] == 4.0f);
            // The thread that ended the last call releases the channel a moment later.
            const std::int64_t until = now_ns() + 30 * SECOND;
            while (part->ongoing() >= 0 && now_ns() < until) std::this_thread::yield();
            CHECK(part->ongoing() < 0);
            group.progress_thread->forget(part);
            const std::weak_ptr<Queue> gone = part;
            part.reset();
            for (int wait = 0; !gone.expired(); ++wait) {  // of the progress thread's last turn
                CHECK(wait < 5000);
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        }
    });
    const Memory another(shape_of(2));
    in_processes(2, [&](int rank) {
        Rank me(another, rank, 1000);
        CHECK(me.run(me.call(Kind::BARRIER, nullptr, nullptr, 0)) == Outcome::DONE);
        if (rank == 1) {
            me.queue->leave_channel();
            return;
        }
        CHECK(me.run(me.call(Kind::BARRIER, nullptr, nullptr, 0)) == Outcome::CLOSED);
        CHECK(me.last->faulty_rank == 1);
    });
}

int bench(int world, std::size_t nbytes, std::size_t slot_bytes, std::size_t small) {
    const Shape shape{world, 4, slot_bytes, small};
    const Memory memory(shape);
    in_processes(world, [&](int rank) {
        Rank me(memory, rank, world > usable_cores() ? 0 : 20'000);
        std::vector<float> data(nbytes / 4, 1e-30f);
        const Call warm = me.call(Kind::ALL_REDUCE, data.data(), data.data(), data.size());
        const Outcome first = me.run(warm);
        CHECK(first == Outcome::DONE);
        const int calls = static_cast<int>(std::max<std::size_t>(5, std::min<std::size_t>(20'000, (400u << 20) / nbytes / static_cast<unsigned>(world))));
        std::vector<double> times;
        for (int round = 0; round < 7; ++round) {
            const std::int64_t began = now_ns();
            for (int i = 0; i < calls; ++i) {
                CHECK(me.run(me.call(Kind::ALL_REDUCE, data.data(), data.data(), data.size())) ==
                      Outcome::DONE);
            }
            times.push_back(static_cast<double>(now_ns() - began) / calls / 1e3);
        }
        std::sort(times.begin(), times.end());
        if (rank == 0) std::printf("%d ranks, %zu bytes: %.2f us\n", world, nbytes, times[3]);
        std::fflush(stdout);
    });
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 3 && std::string(argv[1]) == "bench") {
        const auto slot = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 256 * 1024;
        const auto small = argc > 5 ? std::strtoull(argv[5], nullptr, 10) : 16 * 1024;
        return bench(std::atoi(argv[2]), std::strtoull(argv[3], nullptr, 10), slot, small);
    }
    for (const int world : {2, 3, 5}) check_kinds(world);
    for (const int world : {2, 3}) check_large(world);
    for (unsigned seed = 0; seed < 3; ++seed) check_programs(2 + static_cast<int>(seed), seed);
    check_disagreement();
    check_absence();
    for (unsigned seed = 0; seed < 30; ++seed) check_kill(2 + static_cast<int>(seed) % 3, seed);
    check_two_channels();
    check_left_channels();
    std::puts("shared memory: all checks passed");
    return 0;
}
