"""Speculation on one device: hops that a stand-in predicts (BL-25)."""
