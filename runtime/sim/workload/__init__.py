"""Requests to a simulated cluster: columns and generators."""
