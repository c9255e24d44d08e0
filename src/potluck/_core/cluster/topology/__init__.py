"""The machines and the links between them, as measured.

``hardware`` and ``versions`` describe this machine, ``measure`` measures one path, ``survey``
decides which path is measured next (pure), ``surveyor`` does the I/O. ``graph`` and ``stragglers``
draw conclusions (pure): ring order, addresses to call, slow links.
"""
