"""Models of a device, loaded from the store with each distinct weight held once."""
