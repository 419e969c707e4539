"""Where a sequence runs: variants, paths, estimates of latency, bids."""
