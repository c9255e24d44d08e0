"""torch's process groups, Gloo and NCCL, behind a DistributedContext.

The groups are made directly, not through ``init_process_group``: nothing global is set, and a
script may use torch.distributed beside them. Ranks meet in a TCPStore at MASTER_ADDR:MASTER_PORT.
The store and Gloo's and NCCL's links are neither encrypted nor authenticated.
"""

from potluck.backends.torchdist.backend import GlooBackend, NcclBackend

__all__ = ["GlooBackend", "NcclBackend"]
