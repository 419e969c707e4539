"""Verification, garbage collection, leftovers of interrupted runs."""
