"""Measure what blocks and links cost on a device (BL-11)."""
