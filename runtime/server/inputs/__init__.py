"""Routes that read text or token ids and generate nothing."""
