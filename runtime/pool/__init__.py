"""Managers of the pool: recommend creditors by what agents' heartbeats say (Infinite-LLM's gManager)."""
