"""The ways in which a trainer trains its network, one for each strategy."""
