"""Decide where a sequence runs: variants, paths, latency estimates, bids."""
