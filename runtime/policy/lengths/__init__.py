"""Forecasts of how long an answer gets (TI-10, UN-11)."""
