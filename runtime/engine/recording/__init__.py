"""Recorded decode steps that are replayed (CUDA graphs)."""
