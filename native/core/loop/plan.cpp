#include "core/loop/plan.hpp"

#include <algorithm>
#include <cstring>

#include "core/kernels/reduce.hpp"

namespace potluck {

CompiledPlan::CompiledPlan(PlanSpec given)
    : spec(std::move(given)),
      num_segments(spec.chunks.size()),
      segment_elements(std::max<uint64_t>(1, spec.segment_bytes / item_bytes(spec.dtype))) {
    // An empty chunk has one segment too: its frame is the signal that a barrier is made of.
    for (size_t index = 0; index < spec.chunks.size(); ++index) {
        const uint64_t elements = spec.chunks[index].elements;
        num_segments[index] = static_cast<uint32_t>(
            std::max<uint64_t>(1, (elements + segment_elements - 1) / segment_elements));
    }
    std::vector<int32_t> latest(spec.chunks.size(), -1);
    previous.reserve(spec.steps.size());
    for (uint32_t index = 0; index < spec.steps.size(); ++index) {
        const Step& step = spec.steps[index];
        const bool is_send = step.action == Action::send;
        std::vector<int>& peers = is_send ? send_peers : receive_peers;
        std::vector<Queue>& queues = is_send ? sends : receives;
        const auto found = std::find(peers.begin(), peers.end(), step.peer);
        const auto at = static_cast<size_t>(found - peers.begin());
        if (found == peers.end()) {
            peers.push_back(step.peer);
            queues.emplace_back();
        }
        queues[at].steps.push_back(index);
        queues[at].num_segments += num_segments[step.chunk];
        previous.push_back(latest[step.chunk]);
        latest[step.chunk] = static_cast<int32_t>(index);
        total_segments += num_segments[step.chunk];
    }
}

RunningPlan::RunningPlan(PlanArguments given, std::shared_ptr<Ticket> ticket)
    : Operation(std::move(ticket)),
      arguments(std::move(given)),
      spec(arguments.plan->spec),
      sequence(arguments.sequence),
      key(spec.channel, sequence),
      deadline_(arguments.deadline),
      sends_(begin(arguments.plan->send_peers, arguments.plan->sends)),
      receives_(begin(arguments.plan->receive_peers, arguments.plan->receives)),
      started_(spec.steps.size()),
      done_(spec.steps.size()),
      left_(arguments.plan->total_segments) {}

RunningPlan::Queues RunningPlan::begin(const std::vector<int>& peers,
                                       const std::vector<CompiledPlan::Queue>& all) {
    Queues queues;
    for (size_t at = 0; at < peers.size(); ++at) {
        queues.emplace(peers[at], Queue{&all[at], 0, all[at].num_segments});
    }
    return queues;
}

RunningPlan::Queue* RunningPlan::find(Queues& queues, int peer) {
    const auto found = queues.find(peer);
    return found == queues.end() || found->second.is_empty() ? nullptr : &found->second;
}

const RunningPlan::Queue* RunningPlan::find(const Queues& queues, int peer) {
    const auto found = queues.find(peer);
    return found == queues.end() || found->second.is_empty() ? nullptr : &found->second;
}

bool RunningPlan::is_ready(uint32_t step, uint32_t segment) const {
    const int32_t before = arguments.plan->previous[step];
    return before < 0 || done_[static_cast<size_t>(before)] > segment;
}

Segment RunningPlan::segment_of(uint32_t step, uint32_t number) const {
    const uint32_t index = spec.steps[step].chunk;
    const Chunk& chunk = spec.chunks[index];
    const uint64_t most = arguments.plan->segment_elements;
    const uint64_t start = std::min(chunk.elements, number * most);
    Segment segment;
    segment.step = step;
    segment.chunk = index;
    segment.number = number;
    segment.data = arguments.buffers[chunk.buffer] + (chunk.start + start) * item_bytes(spec.dtype);
    segment.elements = std::min(most, chunk.elements - start);
    segment.nbytes = static_cast<uint32_t>(segment.elements * item_bytes(spec.dtype));
    segment.wire_bytes = segment.nbytes;
    if (is_coded(segment)) {
        segment.wire_bytes = static_cast<uint32_t>(encoded_bytes(spec.codec, segment.elements));
    }
    return segment;
}

// -- sending

bool RunningPlan::next_send(int peer, Segment& segment) const {
    const Queue* queue = find(sends_, peer);
    if (queue == nullptr) return false;
    const uint32_t step = queue->front();
    if (!is_ready(step, started_[step])) return false;
    segment = segment_of(step, started_[step]);
    return true;
}

void RunningPlan::issue(int peer, const Segment& segment) {
    start(*find(sends_, peer), segment);
}

bool RunningPlan::is_ahead(int peer, int other) const {
    const auto left = [&](int rank) {
        const Queue* queue = find(sends_, rank);
        return queue == nullptr ? 0 : queue->num_left;
    };
    return left(peer) + 1 < left(other);
}

// The twin of engine/arrays/coding.py. A chunk that this rank owns is encoded once, and the same
// bytes go to all ranks. It is then replaced by its decoded form, so that the owner ends with the
// same bits as the other ranks.
Bytes RunningPlan::encoded(const Segment& segment) {
    if (!is_coded(segment)) return nullptr;
    const uint32_t num_takers = spec.chunks[segment.chunk].num_takers;
    if (num_takers == 0) return encode_segment(segment, spec.scale);
    const auto [found, is_new] = shared_.try_emplace({segment.chunk, segment.number});
    Shared& shared = found->second;
    if (is_new) {
        if (spec.late_scale != 1) {
            divide(spec.dtype, segment.data, segment.data, segment.elements, spec.late_scale);
        }
        shared = {encode_segment(segment, spec.scale * spec.late_scale), num_takers};
        decode(spec.codec, segment.data, shared.bytes->data(), segment.elements);
    }
    const Bytes bytes = shared.bytes;  // before the entry is erased
    if (--shared.num_left == 0) shared_.erase(found);
    return bytes;
}

Bytes RunningPlan::encode_segment(const Segment& segment, double unit) const {
    auto bytes = std::make_shared<std::vector<uint8_t>>(segment.wire_bytes);
    const int64_t start = spec.chunks[segment.chunk].residual;
    if (arguments.residual == nullptr || start < 0) {
        ticket->num_beyond += encode(spec.codec, bytes->data(), segment.data, segment.elements);
    } else {
        // Error feedback (1-bit SGD, Seide et al. 2014): add what earlier calls have lost, encode
        // the sum, keep what this call loses.
        const uint64_t first = start + segment.number * arguments.plan->segment_elements;
        float* residual = arguments.residual + first;
        const auto divide_residual = [&](double divisor) {
            if (unit != 1) divide(spec.dtype, residual, residual, segment.elements, divisor);
        };
        divide_residual(unit);
        ticket->num_beyond += encode_with_residual(spec.codec, bytes->data(), residual, segment.data,
                                                   segment.elements);
        divide_residual(1 / unit);
    }
    return bytes;
}

// -- receiving

bool RunningPlan::next_receive(int peer, Segment& segment) const {
    const Queue* queue = find(receives_, peer);
    if (queue == nullptr) return false;
    segment = segment_of(queue->front(), started_[queue->front()]);
    return true;
}

bool RunningPlan::combines(const Segment& segment) const {
    return spec.steps[segment.step].action == Action::reduce;
}

void RunningPlan::apply(const Segment& segment, const uint8_t* part, size_t offset,
                        size_t count) const {
    if (count == 0) return;
    if (is_coded(segment)) {
        if (combines(segment)) {
            decode_accumulate(spec.codec, segment.data, part, segment.elements);
        } else {
            decode(spec.codec, segment.data, part, segment.elements);
        }
    } else if (combines(segment) && spec.has_codec) {
        accumulate(segment.data + offset, part, count / item_bytes(spec.dtype));
    } else if (combines(segment)) {
        combine(spec.dtype, spec.op, segment.data + offset, part, count / item_bytes(spec.dtype));
    } else {
        std::memcpy(segment.data + offset, part, count);
    }
}

void RunningPlan::start(Queue& queue, const Segment& segment) {
    --queue.num_left;
    if (++started_[segment.step] == arguments.plan->num_segments[segment.chunk]) ++queue.at;
}

void RunningPlan::advance(uint32_t step) {
    ++done_[step];
    --left_;
}

// -- the whole plan

void RunningPlan::conclude() const {
    uint8_t* result = arguments.buffers[result_buffer];
    if (result == nullptr || spec.ranks.size() < 2 || spec.num_concluded == 0) return;
    if (spec.divisor != 1) divide(spec.dtype, result, result, spec.num_concluded, spec.divisor);
    if (spec.is_computed_by_all) canonicalize_nans(spec.dtype, result, spec.num_concluded);
    if (arguments.narrowed != nullptr) {
        narrow(Dtype::float16, arguments.narrowed, result, spec.num_concluded);
    }
}

std::vector<Awaited> RunningPlan::awaited() const {
    static const char* const names[] = {"SEND", "COPY", "REDUCE"};
    std::vector<Awaited> waits;
    const auto add = [&](const Queues& queues, const std::vector<int>& peers) {
        for (int peer : peers) {
            const Queue* queue = find(queues, peer);
            if (queue == nullptr) continue;
            const Step& step = spec.steps[queue->front()];
            waits.emplace_back(peer, "step " + std::to_string(queue->front() + 1) + " of " +
                                         std::to_string(spec.steps.size()) + ", " +
                                         names[static_cast<size_t>(step.action)] + " chunk " +
                                         std::to_string(spec.chunks[step.chunk].number));
        }
    };
    add(receives_, receive_peers());
    add(sends_, send_peers());
    return waits;
}

// Whether `peer` is still needed: it must receive a segment, or send one.
bool RunningPlan::needs(int peer) const {
    return find(sends_, peer) != nullptr || find(receives_, peer) != nullptr;
}

int RunningPlan::missing(const std::set<int>& departed) const {
    for (int peer : departed) {
        if (needs(peer)) return peer;
    }
    return -1;
}

std::string RunningPlan::name() const { return spec.call + " #" + std::to_string(sequence); }

}  // namespace potluck
