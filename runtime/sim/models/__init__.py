"""Simulated models: shapes, families, variants, stand-ins."""
