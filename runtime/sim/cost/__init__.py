"""What a step costs on simulated hardware, or by stored profiles."""
