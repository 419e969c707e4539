"""The agents of a cluster from the driver's side: inline or remote, and their lifecycles."""
