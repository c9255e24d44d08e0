// A plan under way: which segment each link may move next. The twin of engine/loop/running.py.
//
// Decides only; moves no bytes. Per link and direction there is a queue of steps (rule 2). A segment
// of a step may move once the step before it on the same chunk has finished that segment (rule 1).
// Segments of a step move in order, so one counter a step is enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
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
};

// The memory of one chunk; `number` is its name in the plan.
struct Chunk {
    uint32_t number;
    uint8_t* data;
    uint64_t elements;
};

// One collective as the caller describes it.
struct PlanSpec {
    uint64_t id = 0;
    std::string call;  // for errors
    uint64_t fingerprint = 0;
    uint32_t channel = 0;
    uint64_t sequence = 0;
    double deadline = 0;
    Dtype dtype = Dtype::uint8;
    Op op = Op::sum;
    uint64_t segment_bytes = 0;
    std::vector<int> ranks;  // all members of the channel
    std::vector<Chunk> chunks;
    std::vector<Step> steps;
    bool is_coded = false;
    Codec codec = Codec::fp16;
    uint32_t own = UINT32_MAX;      // number of the chunk that this rank encodes once, for all
    std::vector<float*> residuals;  // by index, nullptr where nothing is fed back; empty: nowhere
    uint8_t* unfinished = nullptr;  // what is worked on once all steps are done
    uint64_t num_unfinished = 0;
    bool is_mean = false;             // then it is divided by the number of ranks
    bool is_computed_by_all = false;  // then its NaNs are made alike
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
    RunningPlan(PlanSpec spec, std::shared_ptr<Ticket> ticket);

    const PlanSpec spec;
    Key key;
    double started = 0;
    bool has_asked = false;
    bool is_overdue = false;
    std::set<int> announced;
    std::map<int, std::deque<KeptPtr>> early;

    const std::vector<int>& send_peers() const { return send_peers_; }
    const std::vector<int>& receive_peers() const { return receive_peers_; }

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
    bool is_coded() const { return spec.is_coded; }
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
    struct Queue {
        std::vector<uint32_t> steps;
        size_t at = 0;
        uint64_t num_left = 0;  // segments that are not issued yet

        bool is_empty() const { return at == steps.size(); }
        uint32_t front() const { return steps[at]; }
    };
    using Queues = std::map<int, Queue>;

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
    std::vector<int> send_peers_;
    std::vector<int> receive_peers_;
    std::vector<int32_t> previous_;
    std::vector<uint32_t> issued_;
    std::vector<uint32_t> done_;
    std::vector<uint32_t> num_segments_;  // by chunk
    uint64_t segment_elements_;
    uint64_t left_ = 0;
    uint32_t num_takers_ = 0;           // sends of the own chunk
    std::map<uint32_t, Shared> shared_;  // its encoded segments that not all have yet
};

}  // namespace potluck
