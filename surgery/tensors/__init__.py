"""Stored tensors as torch tensors: mapped, uploaded, stored."""
