"""A world in which rank 1 has no native core; ranks print the group's engines and three sums."""

import os
import sys

if os.environ.get("RANK") == "1" or sys.argv[1:] == ["without"]:
    os.environ["POTLUCK_NATIVE"] = "0"

import numpy as np

import potluck

with potluck.init(timeout_s=60) as ctx:
    group = ctx.group
    sums = []
    for count in (3, 5_000, 70_000):  # an algorithm is chosen for each
        total = ctx.all_reduce(np.full(count, ctx.rank + 1.0))
        assert total is not None
        sums.append(float(total.sum()) / count)
    engines = ",".join(member.engine for member in group.members)
    print(f"{engines} {group.engine} {sums}", flush=True)
