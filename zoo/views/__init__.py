"""Read-only views of a model in the catalogue: blocks, card, exits."""
