"""Tools to test distributed code: worlds of threads, faults, proxies. For tests only."""

from potluck.testing.elastic import ElasticWorld, Killed, MortalContext
from potluck.testing.world import WorldError, run_world

__all__ = ["ElasticWorld", "Killed", "MortalContext", "WorldError", "run_world"]
