"""What to remove from a block, and how it is carried out."""
