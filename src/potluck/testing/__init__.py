"""Tools to test distributed code: worlds of threads, faults, proxies. For tests only."""
