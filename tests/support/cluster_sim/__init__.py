"""A simulation of many machines: real control-plane cores on a simulated network, disk and clock.

Everything follows from a seed. Nothing here is a network, a process or a training job: messages
are delayed, lost, doubled, reordered and cut off as a fault plan says, and invariants are checked
at every step. ``python -m support.cluster_sim`` is the soak.
"""
