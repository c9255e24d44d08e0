"""Connections to an agent: of other agents (``peers.py``), and of this machine's commands
(``local.py``). Those of its workers are at ``jobs``.
"""
