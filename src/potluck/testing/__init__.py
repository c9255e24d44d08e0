"""Tools for tests of distributed code: worlds of threads, and workers that die."""

from potluck.testing.elastic import ElasticWorld, Killed, MortalContext
from potluck.testing.world import WorldError, run_world

__all__ = ["ElasticWorld", "Killed", "MortalContext", "WorldError", "run_world"]
