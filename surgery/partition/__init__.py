"""Lazy partitioning: which components form blocks (BL-02, BL-03)."""
