"""What the owner of a machine lets the other members of the cluster do there."""
