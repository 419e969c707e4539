"""Engines without tensors, for tests: their tokens depend on every bit of state."""
