"""Scores of a surrogate: similarity and speedup."""
