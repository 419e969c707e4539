"""Choose the path of a sequence among those that the block map allows, by cost."""
