"""Benchmarks of a cluster: hops, scheduling, migrations, killed agents."""
