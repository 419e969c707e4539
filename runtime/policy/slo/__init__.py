"""Predict how long sequences run, and choose those that give way to urgent ones (QLM)."""
