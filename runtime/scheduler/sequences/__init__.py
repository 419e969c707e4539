"""The scheduler's record of a sequence, and its lifecycle."""
