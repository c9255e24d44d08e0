"""torch's own rendezvous (``env://``, ``tcp://``) under ``potluck run``.

The ranks first meet at their agent, which knows who is there, and ends the world when a rank is
lost; only then does torch make the store. Worlds of other ranks than the agent started (of
processes that a worker spawns, say) are torch's alone.
"""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

from potluck.backends.fixed import is_our_world, join_world

_DEFAULT = timedelta(minutes=30)
"""torch's own, for a rendezvous that is given no timeout."""


def meet(url: str, timeout: timedelta | None) -> None:
    """If ``url`` is of the world that this worker was started for: wait until all its ranks are
    there, and set MASTER_ADDR and MASTER_PORT to where rank 0 will have the store."""
    rank, world_size = _given(url, "rank", "RANK"), _given(url, "world_size", "WORLD_SIZE")
    if is_our_world(os.environ, rank, world_size):
        host, port = join_world((timeout or _DEFAULT).total_seconds())
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)


def _given(url: str, name: str, variable: str) -> int:
    """What ``init_process_group`` was given, which torch puts into the URL, or the variable."""
    text = parse_qs(urlsplit(url).query).get(name, [os.environ.get(variable, "")])[0]
    return int(text) if text.isdigit() else -1
