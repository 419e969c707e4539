"""Paged executors: they run steps of whole models and of stages of chains on one device."""
