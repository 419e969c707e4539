"""Text for probes and training, and the comparison of tokenizers."""
