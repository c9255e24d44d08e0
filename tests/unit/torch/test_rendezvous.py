"""torch's rendezvous is spoken for where the group will be potluck's, and left alone elsewhere."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from potluck._core.autoload import _watched
from potluck.torch.process_group.rendezvous import watch

LIMIT = timedelta(seconds=20)


class Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value


STORE = Store()


def handler(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[Any, int, int]]:
    assert (url, timeout, options) == ("env://?rank=1&world_size=2", LIMIT, {"more": 1})
    yield STORE, 1, 2


@pytest.mark.parametrize(
    ("backend", "is_ours"),
    [("potluck", True), ("cpu:potluck,cuda:nccl", True), ("gloo", False), ("undefined", False)],
)
def test_only_a_group_of_potlucks_is_spoken_for(
    backend: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As init_process_group: the handler's caller has the backend in a variable of that name."""
    imported: list[str] = []
    importing = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: (imported.append(name), importing(name))[1]
    )
    found = _watched(handler)("env://?rank=1&world_size=2", timeout=LIMIT, more=1)
    assert next(found) == (STORE, 1, 2)
    assert imported == (["potluck.torch.process_group.rendezvous"] if is_ours else [])


def test_a_rank_that_has_come_says_so_in_the_store() -> None:
    assert next(watch(handler, "env://?rank=1&world_size=2", timeout=LIMIT, more=1))[1:] == (1, 2)
    assert STORE.values == {"potluck/arrived/1": "1"}


def test_the_error_of_a_rank_that_never_reached_rank_0_says_where_it_looked() -> None:
    def fails(url: str, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        raise ConnectionError("timed out")
        yield

    url = "tcp://10.0.0.9:4711?rank=3&world_size=4"
    with pytest.raises(ConnectionError) as caught:
        next(watch(fails, url, timeout=LIMIT))
    assert caught.value.__notes__ == [
        "rank 3 can't reach rank 0 at 10.0.0.9:4711; is rank 0 started, with the same MASTER_ADDR "
        "and MASTER_PORT?"
    ]
