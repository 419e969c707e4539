"""Carry a messenger's frames: over pyzmq, Unix SEQPACKET sockets, or both."""
