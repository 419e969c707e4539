"""A run in virtual time: clock, network, engines, nodes, the simulation itself."""
