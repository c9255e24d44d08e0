"""Which nodes are in the cluster, agreed on by all of them. Pure; the protocol is in
``docs/membership.md``.

``MembershipProtocol`` (``protocol.py``) takes events and gives actions (``events.py``); the other
files are its parts.
"""
