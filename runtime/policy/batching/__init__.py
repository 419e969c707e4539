"""Decide which rows run in a device's next step, paged or dense, and how long to wait for more."""
