"""Attention over pages: the common interface, and implementations with gathered pages and with varlen kernels."""
