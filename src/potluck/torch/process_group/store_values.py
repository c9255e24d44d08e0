"""The values of a store, in a bounded amount of memory."""

from __future__ import annotations

from potluck.torch.process_group.store_messages import Answer, StoreRequest

MAX_BYTES = 64 << 20
"""What all keys and values may take together."""

KEY_OVERHEAD = 256
"""Bytes that a key costs beside its text and its value."""


class Values:
    """The values of a store, by key. Not thread-safe."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._values: dict[str, bytes] = {}
        self._nbytes = 0

    def has(self, key: str) -> bool:
        return key in self._values

    def ask(self, request: StoreRequest) -> Answer | None:
        """The answer of a request, or None while a key of it has no value."""
        try:
            return self._ask(request)
        except ValueError as error:
            return Answer(request.number, error=str(error))
        except IndexError:
            what = f"{request.what} needs a key or a value that was not given"
            return Answer(request.number, error=what)

    def _ask(self, request: StoreRequest) -> Answer | None:
        values, keys = self._values, request.keys
        match request.what:
            case "set":
                self._put(keys[0], request.values[0])
                return Answer(request.number)
            case "add":
                total = int(values.get(keys[0], b"0")) + request.amount
                self._put(keys[0], str(total).encode())
                return Answer(request.number, total)
            case "compare_set":
                expected, desired = request.values[0], request.values[1]
                if values.get(keys[0], expected or None) == expected or (
                    keys[0] not in values and not expected
                ):
                    self._put(keys[0], desired)
                return Answer(request.number, values.get(keys[0], expected))
            case "check":
                return Answer(request.number, all(key in values for key in keys))
            case "wait":
                return Answer(request.number) if all(key in values for key in keys) else None
            case "get":
                return Answer(request.number, values[keys[0]]) if keys[0] in values else None
            case "delete":
                return Answer(request.number, self._remove(keys[0]))
            case "count":
                return Answer(request.number, len(values))
            case _:
                raise ValueError(f"a store has no operation {request.what!r}")

    def _put(self, key: str, value: bytes) -> None:
        before = _size(key, self._values[key]) if key in self._values else 0
        nbytes = self._nbytes - before + _size(key, value)
        if nbytes > self._limit:
            raise ValueError(
                f"the store is full: with this value of {len(value)} bytes its "
                f"{len(self._values)} keys would take {nbytes} bytes, of at most {self._limit}; "
                "delete keys that no rank needs any more, or send the data by a collective"
            )
        self._values[key] = value
        self._nbytes = nbytes

    def _remove(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is not None:
            self._nbytes -= _size(key, value)
        return value is not None


def _size(key: str, value: bytes) -> int:
    return KEY_OVERHEAD + len(key.encode()) + len(value)
