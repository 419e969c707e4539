"""Streams of token events, and the router that fills them."""
