"""Migration of running sequences' K and V between devices (BL-16)."""
