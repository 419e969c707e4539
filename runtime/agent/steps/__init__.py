"""Queue the rows of a device, plan its steps, and send their results on."""
