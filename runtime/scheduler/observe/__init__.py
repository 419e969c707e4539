"""Snapshots for users, and the log from which a run is replayed."""
