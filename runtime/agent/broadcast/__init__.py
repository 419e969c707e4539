"""Dispatch of hops among agents by offers and bids (BL-23)."""
