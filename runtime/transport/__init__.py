"""Carry messages and tensors between processes: authenticated peers, numbered messages in order, channels of bytes."""
