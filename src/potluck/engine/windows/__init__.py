"""Memory that the workers of one node share: a group's windows (``group``), and a channel's
calls to its own (``channel``).
"""
