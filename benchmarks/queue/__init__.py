"""Benchmarks of the queue: order by deadline, what survives a kill, batches beside interactive requests."""
