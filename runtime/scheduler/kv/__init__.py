"""Pages of all devices: accounting, prefix index, prefix cache (BL-32)."""
