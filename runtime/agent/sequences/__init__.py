"""Sequences that run on a device: their tables of pages, their paths."""
