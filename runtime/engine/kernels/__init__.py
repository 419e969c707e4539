"""Kernels of our own for CPUs, in C: compiled where they run, called through ctypes, and never needed
(`EngineConfig.kernels`).
"""
