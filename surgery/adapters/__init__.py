"""Adapters as they come on disk, each kind in its own files: what they say, where they lie on their base, what they
compute.

`placing` tells the kinds apart. Nothing here runs in the engine, which shares the base's products between adapters.
"""
