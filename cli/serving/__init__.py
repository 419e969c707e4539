"""What `zoo serve`, `zoo generate` and `zoo bench` put together: options, models, engines, drivers."""
