"""One rank of the world in which a section of docs/coming-from.md is run: PAGE SECTION PORT PORT.

Each code span of a table's right column is executed, row by row. With ``--beside`` the left one
is executed too, on equal data, and what comes of the two must be equal.
"""

from __future__ import annotations

import ast
import copy
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from coming_from_values import values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import potluck
import potluck._core.settings
import potluck.errors
import potluck.testing.world
import potluck.torch

ROW = re.compile(r"^\| (.*) \| (.*) \|$", re.MULTILINE)
POINTS = (
    np.random.default_rng(0).normal(size=(256, 3)) + np.where(np.arange(256) % 2, 3, -3)[:, None]
)
Check = Callable[[str, Any], None]
CHANGING = ("sender", "t", "a", "out", "parts", "total")
"""What a line may change; the first one it did change is what came of it."""


def rows_of(page: str, section: str) -> list[tuple[list[str], list[str]]]:
    """The code spans, left and right, of each row of the section's table."""
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = ROW.findall(text)[1:]
    return [
        (re.findall("`([^`]+)`", left), re.findall("`([^`]+)`", right)) for left, right in cells
    ]


def data(rank: int, world: int, kind: str) -> dict[str, Any]:
    """Fresh arrays, which differ between ranks: NumPy's for MPI, else torch's."""
    row = np.array([1.0 + rank, 2.0 - 3 * rank, 4.0 * rank + 0.5], np.float32)
    rows = np.stack([row + 10 * each for each in range(world)])
    arrays = {
        **{"t": row, "a": row.copy(), "total": np.zeros_like(row)},
        **{"rows": rows, "out": np.zeros_like(rows), "residual": np.zeros_like(row)},
        "flat": rows.reshape(-1),
    }
    if kind != "MPI":
        arrays = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    return arrays | {"parts": [torch.zeros(3) for _ in range(world)], "sender": None}


def unchecked(span: str, value: Any) -> None:
    """Of lines that are compared with the left column."""


def run(spans: list[str], names: dict[str, Any], check: Check = unchecked) -> Any:
    """What comes of the lines: the last one's value, else what they changed in place. ``check`` is
    called with what comes of each."""
    first = before = copy.deepcopy({name: names[name] for name in CHANGING})
    for span in spans:
        last = ast.parse(span).body[-1]
        is_expression = isinstance(last, ast.Expr)
        exec(f"_ = {span}" if is_expression else f"_ = None\n{span}", names)
        made = names["_"]
        if isinstance(last, ast.Assign):
            exec(f"made = {ast.unparse(last.targets[0])}", names, known := {})
            made = known["made"]
        check(span, made if is_value(made) else changed(names, before))
        before = copy.deepcopy({name: names[name] for name in CHANGING})
    return names["_"] if is_result(names["_"]) else changed(names, first)


def changed(names: dict[str, Any], before: dict[str, Any]) -> Any:
    for name in CHANGING:
        if names[name] is not None and not same(names[name], before[name]):
            return names[name]
    return None


def is_result(value: Any) -> bool:
    return isinstance(value, int | np.ndarray | torch.Tensor) and not isinstance(value, bool)


def is_value(value: Any) -> bool:
    """Whether a value can be compared: numbers, arrays, and lists, tuples and dicts of them."""
    if isinstance(value, dict):
        return bool(value) and all(map(is_value, value.values()))
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_value, value))
    return isinstance(value, int | float | np.ndarray | torch.Tensor)


def as_array(value: Any) -> Any:
    return np.stack([np.asarray(part) for part in value]) if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(as_array(one)), np.asarray(as_array(other)))


def is_code(span: str) -> bool:
    """Whether a span on the left is a line to run, not a word: ``ReduceOp.AVG``."""
    return "(" in span or "=" in span


class Seen:
    """Compares what comes of lines with ``coming_from_values``; each line with a value has one."""

    def __init__(self, world: list[dict[str, Any]], rank: int, section: str) -> None:
        self.num = 0
        self._values = values_of(world, rank, POINTS, is_found=section == "pmetal")

    def check(self, span: str, value: Any) -> None:
        if span not in self._values:
            assert not is_value(value), f"no value is given for {span}: {value}"
            return
        expected = self._values[span]
        if callable(expected):
            assert expected(value), f"{span}: {value}"
        else:
            np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=span)
        self.num += 1


def check_word(span: str) -> bool:
    """Whether the span is a variable or a file, which is then looked for."""
    if span.startswith("POTLUCK_"):
        assert span.removeprefix("POTLUCK_").lower() in dir(potluck._core.settings.load_settings())
    elif span.startswith("~/.potluck/"):
        assert (Path(os.environ["POTLUCK_HOME"]) / span.removeprefix("~/.potluck/")).exists(), span
    elif span in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        pass  # tests/unit/backends/test_launchers.py
    else:
        return False
    return True


def abort_elsewhere(span: str) -> None:
    """A line that ends a group has a world of its own."""

    told = threading.Event()

    def work(ctx: Any) -> None:
        ctx.barrier()  # the ranks are linked: an abort reaches whom it can
        if ctx.rank == 0:
            exec(span, {"ctx": ctx})
            assert told.wait(60)
            return
        try:
            ctx.barrier()
        except potluck.errors.RemoteError as error:
            assert "why" in str(error)
        else:
            raise AssertionError("rank 1 was not told")
        finally:
            told.set()

    potluck.testing.world.run_world(2, work)


def main() -> None:
    path, section, *ports = sys.argv[1:5]
    is_beside = sys.argv[5:] == ["--beside"]
    model, X = nn.Linear(3, 1), torch.from_numpy(POINTS).float()
    y = X.sum(1, keepdim=True)
    names: dict[str, Any] = {
        **{"potluck": potluck, "np": np, "torch": torch, "os": os, "dist": dist},
        **{"timedelta": timedelta, "DataLoader": DataLoader, "model": model},
        "DistributedDataParallel": DistributedDataParallel,
        "dataset": TensorDataset(X, y),
        **{"X": X, "y": y, "points": POINTS, "classes": (POINTS[:, 0] > 0).astype(int)},
        "folder": tempfile.mkdtemp(),
        "RemoteError": potluck.errors.RemoteError,
    }
    if section == "MPI":
        from mpi4py import MPI

        names |= {"MPI": MPI, "status": MPI.Status()}
        rank, world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    else:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    names |= {"rank": rank, "world": world}
    rows = rows_of(Path(path).read_text(), section)
    if any("optimizer" in span for _, right in rows for span in right):
        # Not for every section: torch's first optimizer imports its compiler, a second of CPU.
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    num_compared = num_checked = 0
    for left, right in rows:
        lines = [
            span for span in right if not span.startswith(("$ ", "--")) and not check_word(span)
        ]
        for number, port in enumerate(ports):
            address = f"192.168.1.1{number}:52416"
            lines = [line.replace(address, f"127.0.0.1:{port}") for line in lines]
        if lines and lines[0].startswith("ctx.abort"):
            abort_elsewhere(lines[0])
            continue
        ours = None
        if lines:
            names |= data(rank, world, section)
            world_of = [data(each, world, section) for each in range(world)]
            seen = Seen(world_of, rank, section)
            ours = copy.deepcopy(run(lines, names, unchecked if is_beside else seen.check))
            num_checked += seen.num
        theirs_runs = [span for span in left if is_code(span)] if lines and is_beside else []
        if theirs_runs:
            names |= data(rank, world, section)
            theirs = run(theirs_runs, names)
            is_for_root = re.search(r"\b(dist|comm)\.(reduce|gather|Reduce|Gather)\(", left[0])
            if theirs is None and ours is not None:  # left as it was, as on a broadcast's root
                theirs = names["a" if section == "MPI" else "t"]
            if rank == 0 or not is_for_root:
                agree = theirs is ours is None or (ours is not None and same(theirs, ours))
                assert agree, f"{left}: {theirs}, but {right}: {ours}"
                num_compared += ours is not None
        print(f"rank {rank}: {' ; '.join(lines) or right} -> {ours}", flush=True)
    print(
        f"rank {rank}: {section} is through, {num_compared} compared, {num_checked} checked",
        flush=True,
    )


if __name__ == "__main__":
    main()
