"""``potluck launch``: the same script where machines are managed by somebody else."""
