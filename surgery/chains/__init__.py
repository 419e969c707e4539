"""Chains that are composed here: plans, files, stitches, exits."""
