"""Which rows run in a device's next step: paged, dense, and how long to wait for more."""
