"""A run in virtual time: clock, network, engines, nodes and the simulation itself."""
