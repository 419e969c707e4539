"""Stages of a device: which are loaded, and when an engine may drop one."""
