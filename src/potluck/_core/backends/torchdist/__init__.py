"""torch's process groups Gloo and NCCL as backends of a DistributedContext.

The groups are made directly, not through ``init_process_group``: no global state is set, and a
script may use torch.distributed, too. Ranks meet in a TCPStore at MASTER_ADDR:MASTER_PORT. The
store and the links of Gloo and NCCL are neither encrypted nor authenticated.
"""

from potluck._core.backends.torchdist.backend import GlooBackend, NcclBackend

__all__ = ["GlooBackend", "NcclBackend"]
