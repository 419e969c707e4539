"""The dense executor (Baton): left-padded batches, their K and V, their windows."""
