"""How long a step takes at least, in seconds, and which samples each one has."""

from potluck.training.sampler import Schedule

STEP_S = 0.05
SCHEDULE = Schedule(num_samples=64, batch_size=8, epochs=1_000_000, seed=3)
