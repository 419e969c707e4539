"""The scheduler's record of the devices, and the events of their lives."""
