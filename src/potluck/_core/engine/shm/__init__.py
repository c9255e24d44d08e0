"""Shared memory of the workers of one node: of a group (``group``), and of one channel
(``channel``)."""
