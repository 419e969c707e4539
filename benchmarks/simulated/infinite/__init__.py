"""Infinite-LLM's figures in the simulator: loans beside one instance's memory, and beside one instance on all GPUs."""
