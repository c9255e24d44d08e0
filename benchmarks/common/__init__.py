"""What the benchmarks share besides ``potluck.bench``: training steps, slow CPUs, result files."""
