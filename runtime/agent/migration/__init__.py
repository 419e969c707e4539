"""K and V of running sequences on their way between devices (BL-16)."""
