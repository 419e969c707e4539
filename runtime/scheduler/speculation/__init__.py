"""Which hops are predicted, and what comes of it (BL-25)."""
