"""What the machines and the links between them are: ``hardware`` and ``measure`` find out,
``survey`` decides what to measure next, ``surveyor`` does it, ``graph`` and ``stragglers`` say what
follows.
"""
