"""The serving runtime: requests run as chains of blocks, batched over all models of a device."""
