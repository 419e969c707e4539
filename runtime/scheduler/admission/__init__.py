"""Sequences that wait, which of them are admitted, and which variant of a model they get."""
