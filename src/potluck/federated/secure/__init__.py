"""Secure aggregation: the server learns the sum of the clients' vectors, and no single one.

``masking.py``: masks and whole numbers. ``client.py``, ``server.py``: the two sides of the protocol
(pure but for random keys). ``rounds.py``: its rounds.
"""
