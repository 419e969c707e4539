"""Tokenizers, request bodies, incremental detokenization and stop strings. No sockets and no torch here."""
