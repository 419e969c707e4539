"""One step of an engine: its rows, their layout, segments, and reuse of the step before."""
