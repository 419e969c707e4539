"""Decide which hops are predicted, and whether that pays (BL-25)."""
