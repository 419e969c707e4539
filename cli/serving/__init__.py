"""Options and startup of the serving runtime, shared by `zoo serve`, `zoo generate` and `zoo bench`."""
