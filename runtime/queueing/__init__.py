"""The global queue, request groups and virtual queues. Reserved in the layout; it holds no code yet."""
