"""Running a script's workers.

A job has one ``Lead`` and on each node a ``Crew``. On one machine ``standalone.py`` joins the two.
In a cluster ``coordinator.py`` leads on the leader's node, ``runner.py`` has the crew on every
node, and ``dispatcher.py`` passes messages, views and the commands' requests to both.
"""
