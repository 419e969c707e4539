"""What the demo prints and plots."""
