"""Where checkpoints come from: local folders, Meta's layout, the hub. `open_source` decides which."""
