// A plan under way: which segment each link may move next. The twin of engine/loop/running.py.
//
// What was asked is compiled once (CompiledPlan), how far a call is stands in RunningPlan.
//
// Decides only; moves no bytes. Per link and direction there is a queue of steps (rule 2). A segment
// of a step may move once the step before it on the same chunk has finished that segment (rule 1).
// Segments of a step move in order, so one counter a step is enough.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/kernels/codec.hpp"
#include "core/kernels/dtype.hpp"
#include "core/loop/frame.hpp"
#include "core/loop/hang_detection.hpp"
#include "core/loop/item.hpp"

namespace potluck {

enum class Action : uint8_t { send = 0, copy = 1, reduce = 2 };

struct Step {
    Action action;
    int peer;        // in the whole group's numbering
    uint32_t chunk;  // index into the chunks below
    bool is_coded;   // its bytes are encoded on the wire
};

// The arrays of one call: what the rank contributes, where it wants the outcome, and scratch memory.
// Chunks name them by their place here.
constexpr size_t num_buffers = 3;
constexpr size_t result_buffer = 1;
using Buffers = std::array<uint8_t*, num_buffers>;

// Where one chunk lies in them; `number` is its name in the plan.
struct Chunk {
    uint32_t number;
    uint8_t buffer;
    uint64_t start;  // its first element
    uint64_t elements;
    int64_t residual;  // its first element in the residual; -1: nothing is fed back
    uint32_t num_takers;  // of a chunk that this rank encodes once, for so many ranks; else 0
};

// All of a call that does not change from one call to the next, as Python describes it.
struct PlanSpec {
    std::string call;  // for errors
    uint64_t fingerprint = 0;
    uint32_t channel = 0;
    Dtype dtype = Dtype::uint8;
    Op op = Op::sum;
    uint64_t segment_bytes = 0;
    std::vector<int> ranks;  // all members of the channel
    std::vector<Chunk> chunks;
    std::vector<Step> steps;
    Codec codec = Codec::fp16;        // of the steps that are coded
    uint64_t num_unfinished = 0;      // elements of the result to work on once all steps are done
    bool is_mean = false;             // then they are divided by the number of ranks
    bool is_computed_by_all = false;  // then their NaNs are made alike
};

// A plan with all that follows from it: made once, never changed, shared by its calls.
class CompiledPlan {
public:
    explicit CompiledPlan(PlanSpec spec);

    // The steps of one link in one direction, in their order.
    struct Queue {
        std::vector<uint32_t> steps;
        uint64_t num_segments = 0;
    };

    const PlanSpec spec;
    std::vector<int> send_peers;     // in the order of their first steps
    std::vector<int> receive_peers;
    std::vector<Queue> sends;        // one for each of these
    std::vector<Queue> receives;
    std::vector<int32_t> previous;   // by step: the one before it on the same chunk, -1 for none
    std::vector<uint32_t> num_segments;  // by chunk
    uint64_t segment_elements;
    uint64_t total_segments = 0;     // of all steps
};

// What one call adds to its plan. The memory must stay until the call has ended.
struct PlanCall {
    std::shared_ptr<const CompiledPlan> plan;
    uint64_t sequence = 0;
    double deadline = 0;
    Buffers buffers{};
    float* residual = nullptr;
};

struct Segment {
    uint32_t step = 0;
    uint32_t chunk = 0;
    uint32_t number = 0;
    uint8_t* data = nullptr;
    uint64_t elements = 0;
    uint32_t nbytes = 0;       // in memory
    uint32_t wire_bytes = 0;   // on the wire
};

using Bytes = std::shared_ptr<std::vector<uint8_t>>;

// A frame whose payload had to be kept.
struct Kept {
    Frame frame;
    std::unique_ptr<uint8_t[]> payload;
};
using KeptPtr = std::shared_ptr<Kept>;

class RunningPlan : public Item {
public:
    RunningPlan(PlanCall call, std::shared_ptr<Ticket> ticket);

    const PlanCall call;
    const PlanSpec& spec;
    const uint64_t sequence;
    Key key;
    double started = 0;
    bool has_asked = false;
    bool is_overdue = false;
    std::set<int> announced;
    std::map<int, std::deque<KeptPtr>> early;

    const std::vector<int>& send_peers() const { return call.plan->send_peers; }
    const std::vector<int>& receive_peers() const { return call.plan->receive_peers; }

    // The segment to send to `peer` now; false if there is none (yet).
    bool next_send(int peer, Segment& segment) const;
    // It is being sent; the next call of next_send gives the one after it.
    void issue(int peer, const Segment& segment);
    // Whether `peer` has less left to come than `other`, by more than a segment.
    bool is_ahead(int peer, int other) const;
    // What goes over the wire for it; asked for once, when it is being sent. Empty: its memory.
    Bytes encoded(const Segment& segment);
    // Its bytes have left its memory.
    void sent(const Segment& segment) { advance(segment.step); }

    // The segment that `peer` must send next; false if nothing more is due from it.
    bool next_receive(int peer, Segment& segment) const;
    bool is_ready(const Segment& segment) const { return is_ready(segment.step, segment.number); }
    // Whether the arriving bytes are combined with what is there (else they replace it).
    bool combines(const Segment& segment) const;
    // Whether its payload can only be taken as a whole (else it may come in parts).
    bool is_coded(const Segment& segment) const { return spec.steps[segment.step].is_coded; }
    // Put a part of a segment's payload, from byte `offset` on, where it belongs.
    void apply(const Segment& segment, const uint8_t* part, size_t offset, size_t count) const;
    // All of it has been put there.
    void received(int peer, const Segment& segment);

    bool is_complete() const { return left_ == 0; }
    void conclude() const;

    // Item
    double deadline() const override { return deadline_; }
    void set_deadline(double deadline) { deadline_ = deadline; }
    std::vector<Awaited> awaited() const override;
    int missing(const std::set<int>& departed) const override;
    std::string name() const override;

private:
    // How far the queue of one link in one direction is.
    struct Queue {
        const CompiledPlan::Queue* all;
        size_t at = 0;
        uint64_t num_left;  // segments that are not issued yet

        bool is_empty() const { return at == all->steps.size(); }
        uint32_t front() const { return all->steps[at]; }
    };
    using Queues = std::map<int, Queue>;

    static Queues begin(const std::vector<int>& peers, const std::vector<CompiledPlan::Queue>& all);
    static Queue* find(Queues& queues, int peer);
    static const Queue* find(const Queues& queues, int peer);
    bool is_ready(uint32_t step, uint32_t segment) const;
    Segment segment_of(uint32_t step, uint32_t number) const;
    bool needs(int peer) const;
    void advance(uint32_t step);
    Bytes encode_segment(const Segment& segment) const;

    struct Shared {
        Bytes bytes;
        uint32_t num_left;
    };

    double deadline_;
    Queues sends_;
    Queues receives_;
    std::vector<uint32_t> issued_;
    std::vector<uint32_t> done_;
    uint64_t left_;
    // By chunk and number: segments of own chunks that not all takers have yet.
    std::map<std::pair<uint32_t, uint32_t>, Shared> shared_;
};

}  // namespace potluck
