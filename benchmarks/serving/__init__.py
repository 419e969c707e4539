"""Benchmarks of one device and of HTTP, compared with other engines."""
