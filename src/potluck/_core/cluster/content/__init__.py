"""Files by their content: stored on this machine, fetched from others, served to others."""
