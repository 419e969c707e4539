"""Models of a device: loaded from the store, each distinct weight once."""
