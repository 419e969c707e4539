"""How prompts are cut and ordered."""
