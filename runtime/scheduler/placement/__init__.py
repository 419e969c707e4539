"""Which blocks are on which devices."""
