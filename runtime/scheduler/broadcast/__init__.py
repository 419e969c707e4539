"""The scheduler's part of hops that agents dispatch among themselves (BL-23)."""
