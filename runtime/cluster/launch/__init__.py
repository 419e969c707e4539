"""Launchers of agents: processes, threads, Ray actors."""
