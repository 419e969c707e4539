"""Records decode steps and replays them (CUDA graphs)."""
