"""The control plane: agents find each other, agree who is in, and run jobs on all their machines.

Each folder may import those below it; the last five know nothing of each other:

- ``node_agent.py``: the agent of ``potluck up``, the loop that has all of this
- ``report.py``: the cluster as this node sees it, for the commands
- ``jobs``: running a script's workers, on one machine or on all
- ``groups``: which workers of a job make its next group, and whether a step counts (pure)
- ``topology``: what the machines and the links between them are, as measured
- ``links``: connections to an agent, of its workers, other agents and commands
- ``trust``: the cluster's secret, who this node is, whom it talks to
- ``views``: which nodes are in the cluster (pure)
- ``bundles``: a script's folder on its way to the nodes
- ``discovery``: where other nodes may be
- ``home``: what agents keep on disk
- ``names.py``: what people call the nodes
"""
