"""Hold what schedulers and agents share: request checks, commands, events, counters, trace events."""
