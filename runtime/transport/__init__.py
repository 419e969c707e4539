"""Messages and tensors between processes: peers that prove themselves, numbered messages in order, bytes over
channels.
"""
