"""A cluster in virtual time: the real scheduler and relays, simulated engines and links.

    scenario (presets, files) --play--> driver: clock, nodes, network, engine (costs, families) --> ledger --> report,
    study

A run is a function of its scenario and its seed. It never waits, and needs no device, no weights and no torch.
"""
