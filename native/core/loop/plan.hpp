// The execution state of a plan: which segment each link may move next. The twin of
// engine/loop/running.py. Decides only; moves no bytes.
//
// A plan is compiled once (CompiledPlan) and shared by its calls; each call has a RunningPlan. The
// rules are those of collectives/plan.py. Per link and direction there is a queue of steps (rule
// 2). A segment of a step may move once the step before it on the same chunk has finished that
// segment (rule 1), so steps are pipelined. The segments of a step move in order, so one counter
// per step is enough.
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
#include "core/loop/operation.hpp"

namespace potluck {

enum class Action : uint8_t { send = 0, copy = 1, reduce = 2 };

struct Step {
    Action action;
    int peer;        // in the whole group's numbering
    uint32_t chunk;  // index into PlanSpec::chunks
    bool is_coded;   // its bytes are encoded on the wire
};

// The arrays of one call: the rank's contribution, the result, and scratch memory. Chunks name them
// by their index.
constexpr size_t num_buffers = 3;
constexpr size_t result_buffer = 1;
using Buffers = std::array<uint8_t*, num_buffers>;

// The place of one chunk in the buffers; `number` is the chunk's name in the plan.
struct Chunk {
    uint32_t number;
    uint8_t buffer;
    uint64_t start;  // its first element
    uint64_t elements;
    int64_t residual;     // its first element in the residual of error feedback; -1: none
    uint32_t num_takers;  // how many ranks get the same encoded bytes of it; 0: encoded for each
};

// What does not change from one call of a plan to the next, as Python describes it.
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
    bool has_codec = false;
    Codec codec = Codec::fp16;        // of the coded steps
    uint64_t num_concluded = 0;       // elements of the result that `conclude` works on
    double divisor = 1;               // `conclude` divides them by it
    double scale = 1;                 // what contributions to a coded mean were divided by
    double late_scale = 1;            // what the sums of own chunks are divided by, then encoded
    bool is_computed_by_all = false;  // each rank computes the result: NaNs are canonicalized
};

// A plan and the tables that follow from it: made once, immutable, shared by its calls.
class CompiledPlan {
public:
    explicit CompiledPlan(PlanSpec spec);

    // The steps of one link in one direction, in their order.
    struct Queue {
        std::vector<uint32_t> steps;
        uint64_t num_segments = 0;
    };

    const PlanSpec spec;
    std::vector<int> send_peers;  // in the order of their first steps
    std::vector<int> receive_peers;
    std::vector<Queue> sends;  // by index of send_peers
    std::vector<Queue> receives;
    std::vector<int32_t> previous;       // by step: the step before on the same chunk, -1: none
    std::vector<uint32_t> num_segments;  // by chunk
    uint64_t segment_elements;
    uint64_t total_segments = 0;  // of all steps
};

// A plan, and what one call of it adds. The arrays must stay until the call has ended.
struct PlanArguments {
    std::shared_ptr<const CompiledPlan> plan;
    uint64_t sequence = 0;
    double deadline = 0;
    Buffers buffers{};
    float* residual = nullptr;
    uint8_t* narrowed = nullptr;  // `conclude` rounds a float32 result to float16 into it
};

// One segment of one step: the unit that is sent in a frame.
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

// A segment that has arrived and waits for its memory, with its payload.
struct EarlySegment {
    Segment segment;
    std::unique_ptr<uint8_t[]> payload;
};

class RunningPlan : public Operation {
public:
    RunningPlan(PlanArguments arguments, std::shared_ptr<Ticket> ticket);
    RunningPlan(const RunningPlan&) = delete;  // what waits in `early` has one owner
    RunningPlan& operator=(const RunningPlan&) = delete;

    const PlanArguments arguments;
    const PlanSpec& spec;
    const uint64_t sequence;
    Key key;
    double started = 0;
    bool has_queried = false;  // HANG_QUERY was sent because it stalls
    bool is_overdue = false;  // the deadline has passed, and all members were queried
    std::set<int> told_begun;  // peers that BEGUN was sent to
    std::map<int, std::deque<EarlySegment>> early;  // by peer, in the plan's order

    const std::vector<int>& send_peers() const { return arguments.plan->send_peers; }
    const std::vector<int>& receive_peers() const { return arguments.plan->receive_peers; }

    // The segment to send to `peer` now; false if there is none (yet).
    bool next_send(int peer, Segment& segment) const;
    // `segment` is being sent: next_send gives the one after it from now on.
    void issue(int peer, const Segment& segment);
    // Whether `peer` has more than one segment less left to be sent to than `other`.
    bool is_ahead(int peer, int other) const;
    // The encoded bytes of a coded segment, null for any other. Called once per segment: with error
    // feedback it changes the residual.
    Bytes encoded(const Segment& segment);
    // The segment's memory may be overwritten now.
    void sent(const Segment& segment) { advance(segment.step); }

    // The segment that `peer` must send next; false if nothing more may come from it.
    bool next_receive(int peer, Segment& segment) const;
    // All bytes of `segment` are here: next_receive gives the one after it from now on.
    void arrived(int peer, const Segment& segment) { start(*find(receives_, peer), segment); }
    // Whether the memory of a segment to receive may be written now (rule 1).
    bool is_ready(const Segment& segment) const { return is_ready(segment.step, segment.number); }
    // Whether the arriving bytes are reduced into the segment's memory (else they replace it).
    bool combines(const Segment& segment) const;
    // Whether the payload is encoded. Then it can only be applied whole, not in parts.
    bool is_coded(const Segment& segment) const { return spec.steps[segment.step].is_coded; }
    // Copy, reduce or decode a part of a segment's payload, from byte `offset` on.
    void apply(const Segment& segment, const uint8_t* part, size_t offset, size_t count) const;
    // All of the segment's payload has been applied.
    void applied(const Segment& segment) { advance(segment.step); }

    bool is_complete() const { return left_ == 0; }
    // After the last step: divide a mean, canonicalize NaNs.
    void conclude() const;

    // Operation
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
        uint64_t num_left;  // segments that are not issued, or have not arrived

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
    void start(Queue& queue, const Segment& segment);
    void advance(uint32_t step);
    // `unit`: what the segment was divided by, unlike the residual.
    Bytes encode_segment(const Segment& segment, double unit) const;

    // A segment that several ranks get with the same encoded bytes.
    struct Shared {
        Bytes bytes;
        uint32_t num_left;  // ranks that it was not sent to yet
    };

    double deadline_;
    Queues sends_;
    Queues receives_;
    std::vector<uint32_t> started_;  // by step: segments whose sending has begun, or that arrived
    std::vector<uint32_t> done_;     // by step: segments that were sent or applied completely
    uint64_t left_;                  // segments that are not done, of all steps
    // By chunk and number of the segment.
    std::map<std::pair<uint32_t, uint32_t>, Shared> shared_;
};

}  // namespace potluck
