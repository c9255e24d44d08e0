// Whether a group lives. The first failure ends it, once and for all; what to call it is decided in
// Python (engine/failures/verdict.py), from the facts here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/loop/item.hpp"

namespace potluck {

struct Fact {
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

class Fate {
public:
    bool is_over() const { return fact_.kind != Fact::Kind::none; }
    const Fact& fact() const { return fact_; }

    // End the group; the first fact wins. `item` is what the rank was at, nullptr for nothing.
    void fail(Fact::Kind kind, int rank, std::string text, const Item* item,
              std::vector<uint8_t> payload = {}) {
        if (is_over()) return;
        fact_.kind = kind;
        fact_.rank = rank;
        fact_.text = std::move(text);
        fact_.payload = std::move(payload);
        if (item != nullptr) {
            fact_.has_item = true;
            fact_.item = item->name();
            fact_.awaited = item->awaited();
        }
    }
    // `rank` made the call, or sent the message, that `number` and `dtype` say.
    void disagree(Fact::Kind kind, int rank, const Item& item, uint64_t number, int dtype = 0) {
        if (is_over()) return;
        fact_.number = number;
        fact_.dtype = dtype;
        fail(kind, rank, "", &item);
    }

private:
    Fact fact_;
};

}  // namespace potluck
