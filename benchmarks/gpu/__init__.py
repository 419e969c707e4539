"""Checks of the engine on one GPU, each in a process of its own (`python -m benchmarks.gpu_bringup`)."""
