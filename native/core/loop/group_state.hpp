// The state of a group: alive, or over with a failure. The first failure ends it for good. The twin
// of engine/failures/group_state.py; Python makes the error (engine/failures/group_errors.py).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/loop/item.hpp"

namespace potluck {

// What ended a group, as far as the loop knows.
struct GroupFailure {
    enum class Kind {
        none,
        lost,      // the link to `rank` ended: `text`
        violated,  // what `rank` sent makes no sense: `text`
        no_link,   // there is no link to `rank` to be had; whoever said so knows why
        left,      // `rank` left, and `item` still needs it
        overdue,   // `item` has passed its deadline; `rank` is known to hold it up, or -1
        desync,    // `rank` made another call than `item`: its fingerprint is `number`
        misfit,    // `rank` sent another message than `item`: `number` bytes of `dtype`
        told,      // `rank` has said why the group is over: `payload`
        stopped,   // by the caller, who knows why
        closed,    // left in order, or while operations were under way
        broke,     // an error of the loop itself: `text`
    };

    Kind kind = Kind::none;
    int rank = -1;
    std::string text;
    bool has_item = false;
    std::string item;
    std::vector<Awaited> awaited;
    std::vector<uint8_t> payload;
    uint64_t number = 0;
    int dtype = 0;
};

class GroupState {
public:
    bool is_over() const { return failure_.kind != GroupFailure::Kind::none; }
    const GroupFailure& failure() const { return failure_; }

    // End the group; the first failure wins. `item` is what the rank was at, nullptr for nothing.
    void fail(GroupFailure::Kind kind, int rank, std::string text, const Item* item,
              std::vector<uint8_t> payload = {}) {
        if (is_over()) return;
        failure_.kind = kind;
        failure_.rank = rank;
        failure_.text = std::move(text);
        failure_.payload = std::move(payload);
        if (item != nullptr) {
            failure_.has_item = true;
            failure_.item = item->name();
            failure_.awaited = item->awaited();
        }
    }
    // `rank` made the call, or sent the message, that `number` and `dtype` say.
    void disagree(GroupFailure::Kind kind, int rank, const Item& item, uint64_t number,
                  int dtype = 0) {
        if (is_over()) return;
        failure_.number = number;
        failure_.dtype = dtype;
        fail(kind, rank, "", &item);
    }

private:
    GroupFailure failure_;
};

}  // namespace potluck
