"""torch.distributed over potluck: ``torch.distributed.init_process_group("potluck")``."""

from potluck.torch.process_group.registration import register

__all__ = ["register"]
