"""The versions of the protocol between agents, workers and commands.

Each side of a connection says the versions that it speaks (``greeting.py``), and both use the
newest that they have in common. Unknown fields are ignored, so a new field with a default needs no
new version. A message of a new type is not sent to a peer of an older version. What a version knows
is written down here when the next one begins; a type that is in none of these lists needs the
newest version.

| version | what is new |
|---|---|
| 1 | |
| 2 | code and results travel over bulk connections; the history of jobs |
"""

from __future__ import annotations

OLDEST = 1
NEWEST = 2
JOBS_SINCE = 2
"""Nodes of older versions are in the cluster, but run no jobs of this release: they can't fetch the
code."""

_OF_NODES = """
Accepted Decided Heartbeat IndirectProbe Ping Pong Prepare Promise Propose Reached RecoveryReport
RecoveryRequest Rejected Introduction Records RecordsDigest RecordsWanted Secret SecretWanted Facts
Measured Offer Request Response Failure JobRuns JobRunsRequest NodeServices NodeServicesRequest
Results ResultsRequest
"""
_OF_JOBS = """
InterruptJob JobEnded JobList JobNote JobStatus LabelledOutput NodeReport Order Output SendToWorkers
SignalWorkers StartWorker Submit Submitted WorkerEvent Disconnected Exited OutputEnded Stalled
Started ChaosDone ChaosDue Entered Failed Finished GroupOver Hold Lost Mended NewGroup Probe
ProbeReply Ready Stop Waiting WorkerNote WorkerProgress
"""
_OF_COMMANDS = """
CommandResult ContinueRequest ForwardedRequest ForwardedResponse InterruptRequest JobsReply
JobsRequest NodesReply NodesRequest RunRequest ServeRequest ServicesReply ServicesRequest
ShareRequest
"""

KNOWN = {1: frozenset((_OF_NODES + _OF_JOBS + _OF_COMMANDS).split())}
"""The names of the types that peers of older versions know, by version."""
