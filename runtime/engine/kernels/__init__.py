"""Optional native CPU kernels in C, compiled on the machine that runs them and called through ctypes.

`EngineConfig.kernels` selects them; everything also runs without.
"""
