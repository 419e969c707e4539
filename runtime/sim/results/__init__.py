"""What a simulated run comes to."""
