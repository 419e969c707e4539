"""Decisions on prompts: the order in which they run, and the size of the chunks that they run in. Pure."""
