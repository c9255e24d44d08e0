"""Parameter servers: workers push gradients and pull parameters, each at a time of its own.

``server.py``: ``ParameterServer``, what a script holds; ``arguments.py`` checks what it is given,
``calls.py`` calls the servers, by ``remotes.py``.

On a worker that is a server: ``serving.py``, from its beginning to its end; ``offer.py``: the
service that others call; ``replica.py``: what each server keeps. ``host.py``: the first server, its
waits and decisions; ``telling.py``: its replies, which wait for copies. ``checkpoints.py``: those
of one server. With several: ``log.py``: decisions that another server may lack; ``leader.py``
brings these to the others, and all servers to one state, by what ``follower.py`` offers;
``shard_calls.py``: what workers ask of each.

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
