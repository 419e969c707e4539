"""Resumable training: loop, schedule, checkpoint."""
