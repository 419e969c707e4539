"""On which devices block instances are put and moved."""
