"""Which nodes are in the cluster, agreed on by all of them. Pure; the protocol is in
``docs/membership.md``.

``Node`` (``node.py``) takes events and gives actions (``events.py``); other files are its parts.
"""
