"""Connections to an agent: of its workers (``control.py``), of other agents (``peers.py``), of this
machine's commands (``local.py``). Their messages are in the files of the same names in ``wire``.
"""
