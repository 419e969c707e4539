"""Decide which weights are on a device that cannot hold all of its models at once (QL-13, UN-04)."""
