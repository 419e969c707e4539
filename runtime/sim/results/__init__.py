"""Results of a simulated run."""
