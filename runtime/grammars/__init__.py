"""Grammars that answers are constrained to: their text, their limits, and the masks of allowed tokens.

`llguidance` compiles and follows them. It is imported by the first request that has a grammar, not before. Nothing here
depends on HTTP, on torch or on how models are loaded.
"""
