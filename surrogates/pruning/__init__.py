"""Pruning: choose what to remove from a block, and remove it."""
