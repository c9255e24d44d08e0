"""Hostile messages: anything that the schemas of the wire allow, from a seed.

``anything(kind, chance)`` makes a value of a type over its whole range, its ends above all;
``changed(message, chance)`` is a real message with one field that lies. Names come from ``Words``
most of the time, because a lie about what exists does more harm than noise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

MAX_LENGTH = 4
"""Items of a made sequence; tests of sizes make their own."""


# msgspec works these out anew for each call, which took 40% of the simulator's time.
_type_info = cache(inspect.type_info)
_fields = cache(msgspec.structs.fields)


class Hostile:
    """Makes messages; ``words`` are names that mean something to the receiver."""

    def __init__(self, chance: random.Random, words: Sequence[str] = ()) -> None:
        self.chance = chance
        self.words = list(words)
        self.numbers: list[int] = [0, 1, 2, 3]
        self.known: dict[type, list[Any]] = {}
        """Structs that were seen, of which parts are taken over."""

    def saw(self, message: Any) -> None:
        """Learn the names, numbers and structs of a real message."""
        if isinstance(message, msgspec.Struct):
            kept = self.known.setdefault(type(message), [])
            kept.append(message)
            del kept[:-8]
            for name in message.__struct_fields__:
                self.saw(getattr(message, name))
        elif isinstance(message, tuple):
            for each in message[:8]:
                self.saw(each)
        elif isinstance(message, str) and message not in self.words[-64:]:
            self.words = [*self.words[-200:], message]
        elif isinstance(message, int) and not isinstance(message, bool):
            self.numbers = [*self.numbers[-64:], message, message + 1]

    def anything(self, kind: Any) -> Any:
        """Any value of the type ``kind``."""
        return self._make(_type_info(kind), 0)

    def changed(self, message: Any) -> Any:
        """``message`` with another value in one or two of its fields, maybe deep inside."""
        for _ in range(self.chance.randint(1, 2)):
            message = self._change(message)
        return message

    def _change(self, message: Any) -> Any:
        chance = self.chance
        fields = _fields(type(message)) if isinstance(message, msgspec.Struct) else ()
        if not fields:
            return message
        field = chance.choice(fields)
        value = getattr(message, field.name)
        if isinstance(value, msgspec.Struct) and chance.random() < 0.7:
            new = self._change(value)
        elif isinstance(value, tuple) and value and chance.random() < 0.7:
            new = self._change_items(value)
        else:
            new = self._make(_type_info(field.type), 1)
        return msgspec.structs.replace(message, **{field.name: new})

    def _change_items(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        chance, at = self.chance, self.chance.randrange(len(items))
        item = items[at]
        if isinstance(item, msgspec.Struct) and chance.random() < 0.7:
            return (*items[:at], self._change(item), *items[at + 1 :])
        if chance.random() < 0.5 and not isinstance(item, int):
            return items[:at] + items[at + 1 :]
        if isinstance(item, str):
            return (*items[:at], self._text(0, 256), *items[at + 1 :])
        if isinstance(item, int):
            return (*items[:at], self._int(0, (1 << 31) - 1), *items[at + 1 :])
        return (*items, item)

    def _make(self, kind: Any, depth: int) -> Any:
        chance = self.chance
        match kind:
            case inspect.StructType(cls=cls):
                if self.known.get(cls) and chance.random() < (0.3 if depth else 0.0):
                    return chance.choice(self.known[cls])
                return cls(
                    **{
                        field.name: self._make(field.type, depth + 1)
                        for field in kind.fields
                        if field.required or chance.random() < 0.7
                    }
                )
            case inspect.DataclassType(cls=cls):
                return cls(**{f.name: self._make(f.type, depth + 1) for f in kind.fields})
            case inspect.UnionType(types=types):
                return self._make(chance.choice(types), depth)
            case inspect.Metadata(type=inner):
                return self._make(inner, depth)
            case inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
                most = min(high if high is not None else MAX_LENGTH, MAX_LENGTH)
                count = chance.randint(low or 0, max(most, low or 0))
                return tuple(self._make(item, depth + 1) for _ in range(count))
            case inspect.ListType(item_type=item):
                return [self._make(item, depth + 1) for _ in range(chance.randint(0, 3))]
            case inspect.DictType(key_type=key, value_type=value):
                count = chance.randint(0, 3)
                return {self._make(key, 9): self._make(value, 9) for _ in range(count)}
            case inspect.TupleType(item_types=items):
                return tuple(self._make(each, depth + 1) for each in items)
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.IntType(ge=ge, gt=gt, le=le, lt=lt):
                low = ge if ge is not None else gt + 1 if gt is not None else -(1 << 63)
                high = le if le is not None else lt - 1 if lt is not None else (1 << 64) - 1
                return self._int(low, high)
            case inspect.FloatType(ge=ge, le=le):
                ends = [x for x in (ge, le) if x is not None]
                if len(ends) < 2:
                    ends += [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, -0.0]
                return chance.choice([*ends, 0.0, 0.1, 1.5] if ge is None or ge <= 0 else ends)
            case inspect.StrType(min_length=low, max_length=high, pattern=pattern):
                return "job" if pattern else self._text(low or 0, high or 4096)
            case inspect.BytesType(min_length=low, max_length=high):
                size = chance.choice([low or 0, min(high if high is not None else 64, 64)])
                return chance.randbytes(max(size, low or 0))
            case inspect.NoneType():
                return None
            case inspect.LiteralType(values=values):
                return chance.choice(values)
            case inspect.EnumType(cls=cls):
                return chance.choice(list(cls))
            case inspect.AnyType():
                return chance.choice([None, 1, "x"])
        raise AssertionError(f"no value for {kind}")

    def _int(self, low: int, high: int) -> int:
        chance = self.chance
        if chance.random() < 0.6:
            value = chance.choice(self.numbers) + chance.choice([-1, 0, 0, 1, 2, 1000])
        else:
            value = chance.choice([low, high, high - 1, low + 1, 1 << 31, 1 << 33, 1 << 20])
        return max(low, min(high, value))

    def _text(self, low: int, high: int) -> str:
        chance = self.chance
        if self.words and chance.random() < 0.85:
            return chance.choice(self.words)[:high]
        text = chance.choice(["", "0", "z" * high, "\x1b]52;c;AAAA\x07", "\u202e\n", "~" * 64])
        return text[:high].ljust(low, "x")
