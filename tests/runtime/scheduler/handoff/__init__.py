"""Tests of hand-offs between devices with roles."""
