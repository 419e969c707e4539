"""Layers of the common shape: products, packed weights, rotary tables, fused halves."""
