"""The command line `zoo`, one file per verb."""
