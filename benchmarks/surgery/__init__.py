"""Benchmarks of ingest, packing, deltas, exits, stitches and surrogates."""
