"""Decide on which devices block instances are placed, and where they move."""
