"""A script's folder on its way to the nodes that run it: what travels, how, where it is kept."""
