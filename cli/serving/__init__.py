"""Settings and wiring of a server: what `zoo serve`, `zoo generate` and `zoo bench` run."""
