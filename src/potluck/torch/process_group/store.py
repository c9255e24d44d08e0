"""A torch Store over potluck's links, for worlds that were formed without a store server.

Rank 0 holds the values. Every other rank sends requests over one link (mutual TLS). The server
answers a request when its keys have values, so a rank that waits for a key does not poll. Messages
are msgpack with a length prefix.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from potluck._core.forks import Owner
from potluck.errors import LinkError
from potluck.torch.process_group.store_client import StoreClient
from potluck.torch.process_group.store_messages import StoreRequest
from potluck.torch.process_group.store_server import StoreServer


class LinkStore(Store):
    """The Store for torch, on any rank."""

    def __init__(self, asker: StoreServer | StoreClient, timeout_s: float) -> None:
        super().__init__()
        self._asker = asker
        self._owner = Owner("this store")
        self._timeout_s = timeout_s
        self._number = 0

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._ask("get", [key])  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount=amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(  # type: ignore[no-any-return]
            "compare_set", [key], [_bytes(expected), _bytes(desired)]
        )

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), timeout=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]))

    def num_keys(self) -> int:
        return int(self._ask("count", []))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _ask(
        self, what: str, keys: list[str], values: list[bytes] | None = None, *, amount: int = 0,
        timeout: timedelta | None = None,
    ) -> Any:  # fmt: skip
        self._owner.check()
        self._number += 1
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        request = StoreRequest(self._number, what, keys, values or [], amount, timeout_s)
        try:
            answer = self._asker.ask(request, time.monotonic() + timeout_s)
        except LinkError as error:
            raise dist.DistStoreError(
                f"{what} of {', '.join(keys)} had no answer within {timeout_s:g} s: {error}"
            ) from error
        if answer.error:
            raise dist.DistStoreError(f"{what} of {', '.join(keys)}: {answer.error}")
        return answer.value


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
