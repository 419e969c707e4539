"""Aliases of the store as a running server answers for them."""
