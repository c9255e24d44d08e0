"""Memory that the workers of one node share: a group's windows (``group``), a channel's calls to
its own (``channel``), and collectives through windows inside nodes and plans between them
(``two_level``).
"""
