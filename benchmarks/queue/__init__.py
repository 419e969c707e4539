"""Benchmarks of durable requests."""
