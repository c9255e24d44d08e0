"""Whom this node talks to: the cluster's secret and its change, this node's identity, bans, and
pairing, which brings a new machine in.
"""
