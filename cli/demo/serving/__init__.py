"""The demo's server, and its client."""
