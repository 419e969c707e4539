"""Paths of new sequences: estimates, routes, blocks in use."""
