"""What the catalogue says of a model: blocks, card, exits."""
