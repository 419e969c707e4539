"""Rows that wait on a device, the steps made of them, and where their results go."""
