"""Devices of a cluster as the scheduler knows them, and the events of their lives."""
