"""Sequences that change a device while they run (BL-16)."""
