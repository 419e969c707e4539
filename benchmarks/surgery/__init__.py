"""Ingest, packing, deltas, exits, stitches, surrogates."""
