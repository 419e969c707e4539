"""Adapters on shared components, each on its own rows of a batch."""
