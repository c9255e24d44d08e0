"""A script's folder on its way to the nodes that run it: packed, sent, and stored on each node."""
