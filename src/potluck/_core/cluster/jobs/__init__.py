"""Running a script's workers.

Each job has one ``JobController``, on the node that leads the cluster (``controller.py``), and one
``LocalRunner`` on each node, which has the processes of its workers there and their links to the
agent (``local_runner.py``). ``dispatcher.py`` takes the messages about jobs of other nodes, the
cluster's views, and requests of this machine's commands. A machine alone is a cluster of one node.
"""
