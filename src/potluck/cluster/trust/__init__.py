"""Trust: the cluster's secret and its change, this node's identity, bans, and pairing, by which a
new machine joins.
"""
