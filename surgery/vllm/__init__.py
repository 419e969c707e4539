"""Stored models in stock vLLM: a folder without weights, and the plugin that reads its tensors from the store."""
