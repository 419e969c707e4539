"""The driver of a cluster: the scheduler's thread, what comes in, what can be seen of it."""
