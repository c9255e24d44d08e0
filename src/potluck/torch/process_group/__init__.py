"""torch.distributed over potluck: ``torch.distributed.init_process_group("potluck")``."""
