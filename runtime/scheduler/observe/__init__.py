"""Snapshots for people, and the log from which a run is replayed."""
