"""Which devices a sequence runs on: the paths that the block map allows, and what each costs."""
