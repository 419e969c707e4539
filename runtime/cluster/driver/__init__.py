"""The driver of a cluster: the scheduler's thread, incoming requests, and a view of the cluster's state."""
