"""Attention over pages: one interface, gathered and variable-length kernels of torch."""
