"""Prompts and decoding apart: hand-offs, role changes, orders of prompts, and predicted lengths (TetriInfer)."""
