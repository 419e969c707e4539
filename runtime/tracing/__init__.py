"""Record events as JSON lines and as OpenTelemetry spans."""
