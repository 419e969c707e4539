"""Admit waiting sequences, and choose the variant of a model that each gets."""
