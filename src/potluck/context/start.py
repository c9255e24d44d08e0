"""``init``: the context of this process, however it was started."""

from __future__ import annotations

import os

from potluck.backends.base import Backend
from potluck.context.context import DistributedContext
from potluck.errors import ConfigurationError
from potluck.settings import load_settings

_BACKENDS = ("auto", "agent", "env", "local")


def init(backend: str = "auto", *, timeout_s: float | None = None) -> DistributedContext:
    """The context of this worker; blocks until its first group is there.

    ``backend`` says where the group comes from:

    - ``"agent"``: the agent that started this worker (``potluck run``);
    - ``"env"``: the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (LOCAL_RANK if set);
    - ``"local"``: nobody else, a world of one;
    - ``"auto"``: the first of these that applies.

    ``timeout_s`` is the deadline of every operation that does not name its own
    (``POTLUCK_PEER_TIMEOUT_S``, 30 s). For a fixed list of peers build
    ``DistributedContext(RingBackend(peers, rank))``.
    """
    settings = load_settings(peer_timeout_s=timeout_s)
    chosen = _detect() if backend == "auto" else backend
    made: Backend
    if chosen == "agent":
        from potluck.backends.agent import AgentBackend

        made = AgentBackend(settings=settings)
    elif chosen == "env":
        from potluck.backends.environment import EnvironmentBackend

        made = EnvironmentBackend(settings=settings)
    elif chosen == "local":
        from potluck.backends.local import LocalBackend

        made = LocalBackend()
    else:
        raise ConfigurationError(
            f"backend {backend!r} is unknown; choose from {', '.join(_BACKENDS)}"
        )
    try:
        return DistributedContext(made, timeout_s=settings.peer_timeout_s)
    except BaseException:
        made.close()
        raise


def _detect() -> str:
    if os.environ.get("POTLUCK_AGENT"):
        return "agent"
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):
        return "env"
    return "local"
