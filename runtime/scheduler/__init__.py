"""The scheduler of a cluster: a state machine over all sequences, devices, pages and paths (`Scheduler`)."""
