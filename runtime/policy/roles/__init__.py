"""Roles of devices: which phases of a sequence they run (TI-04)."""
