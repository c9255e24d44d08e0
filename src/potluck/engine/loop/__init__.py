"""The thread that moves all bytes of one group: the reference (``progress``) and its native twin
(``native``). Which segment may go is in ``plans`` and ``running``, point-to-point messages are in
``messages`` and ``mailbox``, links in ``connections`` and ``connection``.
"""
