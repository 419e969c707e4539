"""A sequence as the scheduler knows it."""
