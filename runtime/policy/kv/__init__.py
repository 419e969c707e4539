"""Decide which duplicates of K and V to drop (BL-27)."""
