"""Memory that the workers of one node share: that of a group (``group``),
and that of one channel (``channel``).
"""
