"""Reproduce BlockLLM's figures with the simulator."""
