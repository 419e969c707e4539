"""Composed chains: plans, files, stitches, exits."""
