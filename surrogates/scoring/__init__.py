"""How alike and how much faster a surrogate is."""
