"""What agents keep on disk, below ``<home>``: private files, their state, where they listen."""
