"""Which block is on which device: at first, for models that come later, and by traffic."""
