"""Hops that agents dispatch among themselves, as the scheduler sees them (BL-23)."""
