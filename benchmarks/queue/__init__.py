"""Measurements of the durable queue."""
