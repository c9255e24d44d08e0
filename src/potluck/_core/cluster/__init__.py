"""The control plane: agents find each other, agree which nodes are in the cluster, and run jobs.

Each folder may import those below it; the last five do not know each other:

- ``run.py``: ``potluck run``, from its options to its summary
- ``node_agent.py``: the agent of ``potluck up`` or of one ``potluck run``
- ``report.py``: the cluster as this node sees it, for the commands
- ``jobs``: running a script's workers
- ``jobs/groups``: which workers make a job's next group (pure)
- ``control_plane.py``: the I/O of ``membership``; ``admission_exchange.py``: of ``trust``
- ``topology``: the machines and the links between them, as measured
- ``links``: connections to an agent: of its workers, of other agents, of commands
- ``trust``: which keys are in the cluster, its secret, this node's identity, pairing
- ``membership``: which nodes are in the cluster (pure)
- ``code_store``: a script's folder on its way to the nodes
- ``discovery``: where other nodes may be
- ``home``: what agents keep on disk
- ``names.py``: the names of nodes for people
"""
