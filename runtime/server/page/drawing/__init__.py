"""Drawings of the page in SVG. Pure functions."""
