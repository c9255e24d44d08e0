"""Connections to an agent: of its workers (``control.py``), of other agents (``peers.py``), of this
machine's commands (``local.py``). What they carry is in the files of the same names in ``wire``.
"""
