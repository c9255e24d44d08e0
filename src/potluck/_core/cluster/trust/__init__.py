"""Trust: the cluster's secret and its rotation, this node's identity, bans, and pairing, which
gives the secret to a new machine.
"""
