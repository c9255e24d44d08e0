"""Levels that people name: ``potluck up --site home/rack1``, from the setting to the bytes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.hosts import Network
from support.machines import Machine, form

pytestmark = pytest.mark.needs_root_netns

SITES = ("home/rack1", "Home/rack1", "home/rack2", "cabin")
"""Racks of two machines and of one, and a site without racks; how a name is written is the same."""
SUMS = """
import json
import numpy as np
import potluck

COUNT = 6 * 7 * 8 * 9 * 100  # all algorithms cut it into equal chunks

def packets():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

def sent(ctx, site):
    # What this rank has sent to ranks outside of its site.
    links = ctx.stats()["links"]
    away = [
        rank for rank, member in enumerate(ctx.group.members)
        if member.site.lower().partition("/")[0] != site
    ]
    names = [f"worker {ctx.group.members[rank].worker}" for rank in away]
    return sum(links[name]["bytes_sent"] for name in names if name in links)

ctx = potluck.init()
site = ctx.group.me.site.lower().partition("/")[0]
numbers = np.arange(COUNT, dtype=np.float32) % 1009
for algorithm in ("hierarchical", "ring"):
    array = numbers * (ctx.rank + 1)
    ctx.all_reduce(array.copy(), algorithm=algorithm)  # the links are there
    ctx.barrier()
    before, on_cable = sent(ctx, site), packets()
    total = ctx.all_reduce(array, algorithm=algorithm)
    done = sent(ctx, site) - before
    ctx.barrier()
    print(json.dumps({
        "rank": ctx.rank, "algorithm": algorithm, "site": site, "bytes": done,
        "on_cable": packets() - on_cable, "whole": COUNT * 4,
        "sites": [member.site for member in ctx.group.members],
        "exact": bool((total == numbers * 36).all()),
    }), flush=True)
    ctx.barrier()
ctx.close()
"""


def test_three_levels_by_name_send_each_byte_once_over_the_slow_level(tmp_path: Path) -> None:
    """Two workers on each of four machines: node < rack < site. Of the two sites each sends the
    array once; in a ring the cabin alone sends 7/4 of it."""
    script = tmp_path / "code" / "sums.py"
    script.parent.mkdir()
    script.write_text(SUMS)
    with Network(4) as network, ExitStack() as stack:
        machines = [
            stack.enter_context(Machine(host, tmp_path / "homes", POTLUCK_SITE=site))
            for host, site in zip(network, SITES, strict=True)
        ]
        form(*machines)

        def has_sites(status: dict[str, Any]) -> bool:
            shown = {each["name"]: each["site"] for each in status["cluster"]["nodes"]}
            return shown == {m.name: s for m, s in zip(machines, SITES, strict=True)}

        machines[3].shows(has_sites)
        assert "home/rack2: carl" in machines[3].runs("status").stdout
        assert "home/rack2" in machines[3].runs("nodes").stdout
        with machines[1].run("-n", "2", script) as run:
            assert run.finish() == 0, run.text
        rows = [json.loads(line[line.index("{") :]) for line in run.lines if '"exact"' in line]
    assert len(rows) == 16
    assert all(row["exact"] for row in rows)
    assert all(sorted(row["sites"]) == sorted([*SITES, *SITES]) for row in rows)
    for algorithm, share in (("hierarchical", 1.0), ("ring", 7 / 4)):
        crossed: dict[str, int] = {}
        for row in rows:
            if row["algorithm"] == algorithm:
                crossed[row["site"]] = crossed.get(row["site"], 0) + row["bytes"]
        print(algorithm, {site: count / rows[0]["whole"] for site, count in crossed.items()})
        # Frames and votes of a few bytes are beside the array.
        for count in crossed.values():
            assert count == pytest.approx(share * rows[0]["whole"], rel=0.01)
    by_levels = [row for row in rows if row["algorithm"] == "hierarchical"]
    on_cable = max(row["on_cable"] for row in by_levels if row["site"] == "cabin")
    assert on_cable == pytest.approx(rows[0]["whole"], rel=0.15), "with headers and other traffic"
