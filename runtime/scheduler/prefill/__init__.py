"""Queues of prompts, and the chunks in which they run (TetriInfer)."""
