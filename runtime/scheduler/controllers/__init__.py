"""Periodic and ordered actions of the scheduler: scaling, balancing, locality, pauses."""
