// The state of a group: alive, or over with a failure. The first failure ends the group for good.
// The twin of engine/failures/group_errors.py; Python makes the error that users see
// (engine/failures/group_errors.py).
//
// Not locked: only the loop's thread changes it. Other threads may read the failure after the event
// `group_failed`, since it does not change after that.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/loop/operation.hpp"

namespace potluck {

// What ended a group, as far as the loop knows.
struct GroupFailure {
    enum class Kind {
        none,
        lost,            // the link to `rank` ended: `text`
        violated,        // `rank` broke the protocol: `text`
        no_link,         // no link to `rank` could be made; the connector knows why
        left,            // `rank` left, and `operation` still needs it
        overdue,         // `operation` has passed its deadline; `rank` is blocking it, or -1
        desync,          // `rank` made another call than `operation`: with fingerprint `number`
        mismatch,        // `rank` sent `number` bytes of `dtype`, which `operation` can't receive
        abort_received,  // `rank` has sent ABORT: `payload` is the reason
        stopped,         // by this process, for a reason that Python knows
        closed,          // this rank left, in order or while operations were under way
        broke,           // an internal error of the loop: `text`
    };

    Kind kind = Kind::none;
    int rank = -1;
    std::string text;
    bool has_operation = false;
    std::string operation;
    std::vector<Awaited> awaited;
    std::vector<uint8_t> payload;
    uint64_t number = 0;
    int dtype = 0;
};

class GroupState {
public:
    bool is_over() const { return failure_.kind != GroupFailure::Kind::none; }
    const GroupFailure& failure() const { return failure_; }

    // End the group; the first failure wins. `operation` is the one that this rank waits in, for
    // the error's text, or nullptr.
    void fail(GroupFailure::Kind kind, int rank, std::string text, const Operation* operation,
              std::vector<uint8_t> payload = {}) {
        if (is_over()) return;
        failure_.kind = kind;
        failure_.rank = rank;
        failure_.text = std::move(text);
        failure_.payload = std::move(payload);
        if (operation != nullptr) {
            failure_.has_operation = true;
            failure_.operation = operation->name();
            failure_.awaited = operation->awaited();
        }
    }
    // End the group because `rank` made the call, or sent the message, that `number` and `dtype`
    // describe.
    void disagree(GroupFailure::Kind kind, int rank, const Operation& operation, uint64_t number,
                  int dtype = 0) {
        if (is_over()) return;
        failure_.number = number;
        failure_.dtype = dtype;
        fail(kind, rank, "", &operation);
    }

private:
    GroupFailure failure_;
};

}  // namespace potluck
