"""Parameter servers: workers push gradients and pull parameters, each at a time of its own.

``server.py``: ``ParameterServer``, what a script holds; ``arguments.py`` checks what it is given,
``calls.py`` calls the servers, by ``remotes.py``. ``offer.py``: the services that a worker calls.
``host.py``: the first server, its waits and decisions; ``checkpoints.py``: its checkpoints;
``log.py``: decisions that another server may lack. ``follower.py``: another server;
``followers.py`` brings it the log, and all servers to one state. ``shard_calls.py``: what workers
ask of each of several servers.

Pure: ``model.py``: what a mode (``modes.py``) makes of gradients; ``staleness.py``: who waits for
whom; ``entries.py``: a decision; ``shard.py``: the tensors of one server, after the decisions;
``table.py``: those of one model, in immutable versions; ``optimizers.py``: their updates;
``layout.py``: names, shapes and dtypes; ``placement.py``: which tensor lies where.
"""

from potluck.parameter_server.modes import (
    AggregationMethod,
    Asynchronous,
    ElasticAveraging,
    Synchronous,
)
from potluck.parameter_server.optimizers import SGD, Adam
from potluck.parameter_server.server import ParameterServer, Pulled

__all__ = [
    "SGD",
    "Adam",
    "AggregationMethod",
    "Asynchronous",
    "ElasticAveraging",
    "ParameterServer",
    "Pulled",
    "Synchronous",
]
