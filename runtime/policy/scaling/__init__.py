"""Decide when a block gets another instance or drops one (BL-24)."""
