"""The order of waiting sequences by deadline, and the eviction of running ones for it (QLM)."""
