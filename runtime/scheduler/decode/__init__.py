"""The decode loop: what comes back becomes tokens, and the next row goes out."""
