"""What a simulated cluster is asked: requests as columns, generators."""
