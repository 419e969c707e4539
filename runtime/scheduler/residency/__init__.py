"""Load stages when requests need them, and unload others to make room."""
