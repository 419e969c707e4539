"""Migration of running sequences to other devices (BL-16)."""
