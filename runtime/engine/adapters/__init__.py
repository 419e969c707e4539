"""Adapters on shared components, each applied to its own rows of a batch."""
