"""The command line `zoo`, one module per verb."""
