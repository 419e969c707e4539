"""Launchers of agents: subprocesses, threads, Ray actors."""
