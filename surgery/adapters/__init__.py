"""Adapters as stored on disk, each kind in its own modules: reading configs and keys, placing tensors, computing.

`placing` tells the kinds apart. Nothing here runs in the engine, which computes the base once for all adapters.
"""
