"""Quantised tensors: schemes, decompression, models made of them."""
