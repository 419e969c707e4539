"""Trainings that can be stopped: loop, schedule, checkpoint."""
