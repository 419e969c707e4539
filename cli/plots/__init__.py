"""Plots of comparisons and experiments."""
