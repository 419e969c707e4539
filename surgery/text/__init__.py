"""Text for probes and training, and tokenizers compared."""
