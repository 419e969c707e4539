"""The virtual clock and the simulated cluster. Reserved in the layout; it holds no code yet."""
