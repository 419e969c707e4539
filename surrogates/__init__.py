"""Pruned stand-ins of blocks (BL-10). Reserved in the layout; it holds no code yet."""
