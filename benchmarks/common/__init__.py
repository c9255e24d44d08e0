"""What benchmarks share beside ``potluck.cli.bench``: training steps, slow CPUs, result files."""
