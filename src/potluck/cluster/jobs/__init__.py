"""Running a script's workers.

Each job has one ``JobController``, on the node that leads the cluster (``controller.py``), and on
each node a ``LocalJob`` of its ``LocalRunner`` (``local_runner.py``), whose workers are processes
with control links (``local_workers.py``). ``dispatcher.py`` takes what other nodes, the cluster's
view and this machine's commands say about jobs. A machine alone is a cluster of one node.
"""
