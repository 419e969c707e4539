"""Reserve the package for the global queue, request groups and virtual queues. It holds no code yet."""
