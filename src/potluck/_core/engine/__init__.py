"""The data plane: the collectives and messages of one group, over links and shared memory.

- ``communicator.py``: what a context talks to; ``resources.py``: what it shares with its sub-groups
- ``shm``: calls inside one node
- ``loop``: the thread that moves all bytes between ranks, and what it decides by
- ``mesh.py``: links over TCP, made on first use
- ``arrays``: where chunks lie in memory, how they are combined and encoded
- ``failures``: what ends a group, and what it is called
- ``request.py``: a call as its caller made it
- ``call.py``, ``work.py``: a call, its result
"""
