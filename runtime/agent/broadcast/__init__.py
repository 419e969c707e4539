"""Hops that agents dispatch among themselves by offers and bids (BL-23)."""
