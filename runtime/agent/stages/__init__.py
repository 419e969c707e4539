"""Stages of a device: which are loaded, and when the engine may unload one."""
