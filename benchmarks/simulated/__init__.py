"""BlockLLM's figures from the simulator."""
