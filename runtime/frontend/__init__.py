"""From text to sequences and back: tokenizers, request bodies, streaming text, stop strings. No sockets, no torch."""
