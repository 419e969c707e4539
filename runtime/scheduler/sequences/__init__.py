"""Sequences as the scheduler sees them, and how they come to devices and leave them."""
