"""Measurements of models that do not fit the device together."""
