"""What carries a messenger's frames: pyzmq, Unix SEQPACKET sockets, or both at once."""
