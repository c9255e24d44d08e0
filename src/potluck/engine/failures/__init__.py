"""What ends a group: once and for all (``fate``), under which name (``verdict``), and who is asked
when an operation does not end (``inquest``).
"""
