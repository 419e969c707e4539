"""The sequences on one device: their page tables and paths."""
