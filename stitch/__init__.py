"""Stitching blocks between models of different width (BL-09). Reserved in the layout; it holds no code yet."""
