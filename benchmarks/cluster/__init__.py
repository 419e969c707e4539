"""Hops, scheduling, kills of agents."""
