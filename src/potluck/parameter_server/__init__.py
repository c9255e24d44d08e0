"""Parameter servers: workers push gradients and pull parameters, each at a time of its own.

``server.py``: ``ParameterServer``, what a script holds. ``offer.py``: the service that a worker
calls. ``host.py``: the models of one server, checkpoints and waits. ``model.py``: what a mode
(``modes.py``) makes of gradients; ``staleness.py``: who waits for whom; ``table.py``: the tensors,
in immutable versions; ``optimizers.py``: their updates. The last four are pure.
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
