"""The agents of a cluster as its driver sees them: inline or remote, and their lives."""
