"""Choose which hops are predicted, and record the outcomes (BL-25)."""
