"""Experiments on accuracy: chains mixed from two models of one shape, measured on text that neither has seen (BlockLLM,
section 4.2).
"""
