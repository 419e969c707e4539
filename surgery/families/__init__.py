"""The table of architectures, their settings and shapes; free of torch."""
