"""Accuracy experiments: chains mixed from two models of one shape, on held-out text (BlockLLM, section 4.2)."""
