"""The control plane: agents find each other, agree who is in, and run jobs on all their machines.

Each folder may import those below it; the last five know nothing of each other:

- ``run.py``, ``job_client.py``: ``potluck run``, from its options to its summary
- ``node_agent.py``: the agent of ``potluck up`` or of one ``potluck run``: makes all of this
- ``report.py``: the cluster as this node sees it, for the commands
- ``jobs``: running a script's workers
- ``groups``: which workers of a job make its next group, and whether a step counts (pure)
- ``control_plane.py``, ``secret_change.py``: the I/O of ``membership`` and of a change of secret
- ``topology``: what the machines and the links between them are, as measured
- ``links``: connections to an agent, of its workers, other agents and commands
- ``trust``: the cluster's secret, who this node is, whom it talks to
- ``membership``: which nodes are in the cluster (pure)
- ``code_store``: a script's folder on its way to the nodes
- ``discovery``: where other nodes may be
- ``home``: what agents keep on disk
- ``names.py``: what people call the nodes
"""
