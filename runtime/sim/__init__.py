"""Simulate a cluster in virtual time: the real scheduler and agents, with simulated engines and links.

    scenario (presets, files) --play--> Simulation: clock, nodes, network, engines (costs, families)
    --> RunRecorder --> report, study

A run is a function of its scenario and its seed. It never waits, and needs no device, no weights and no torch.
"""
