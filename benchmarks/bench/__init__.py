"""What the benchmarks share: groups of ranks, their workers, tables, plots."""
