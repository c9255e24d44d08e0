"""The progress loop, the thread that moves all bytes of one group: in Python (``progress``), or in
C++ with its Python side in ``native``.

Collectives are in ``compiled``, ``running`` and ``plans``, point-to-point messages in ``messages``
and ``mailbox``, links in ``connections``, ``connection`` and ``flow_control``, the end of a failed
group in ``close``. ``native/core/loop/`` has the twins of these files.
"""
