"""Parameter servers: workers push gradients and pull parameters, each at a time of its own.

``server.py``: ``ParameterServer``, what a script holds; ``arguments.py`` checks its arguments, and
``calls.py`` calls the servers. On a worker that is a server, ``serving.py`` runs from begin to end
what other workers call, ``service.py``. ``primary.py``: the decisions of the primary, calls
that wait for an update, and, with several servers, how the primary brings all to one state, and
then the log to each. ``replica.py``: the state of each server. ``checkpoints.py``: the checkpoints
of one server.

Pure: ``model.py``: a model on one server, and the modes, what they make of gradients; ``log.py``:
decisions, in order; ``table.py``: tensors in immutable versions; ``optimizers.py``: their updates;
``layout.py``: names, shapes and dtypes, and the servers of each tensor.
"""

from potluck.parameter_server.model import (
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
