"""Records what happened: JSON lines, OpenTelemetry spans."""
