"""Decide which device holds K and V for another one. Pure."""
