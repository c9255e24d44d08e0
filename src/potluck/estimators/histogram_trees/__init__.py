"""Trees from histograms of all ranks' samples: bins, exact sums, best splits, growth by levels."""
