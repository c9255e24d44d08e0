"""Which worker of a job leads a federation: the first, which is on the node of the command."""

LEADER = "0"
"""The name of the worker that runs the server's function (``Member.worker``)."""

CLIENT_SERVICE = "potluck.federated.client"
SERVER_SERVICE = "potluck.federated.server"
