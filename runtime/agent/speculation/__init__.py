"""Hops that a stand-in predicts (BL-25)."""
