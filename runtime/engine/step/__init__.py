"""Run one step of an engine: its rows, their layout, the segments, and reuse of the step before."""
