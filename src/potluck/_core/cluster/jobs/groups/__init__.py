"""A job's groups: which workers make the next one, and why. Pure: events in, actions out."""
