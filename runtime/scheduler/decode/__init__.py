"""The decode loop: turn results into tokens, send the next rows, detect lost rows."""
