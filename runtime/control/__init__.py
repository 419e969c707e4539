"""What schedulers and agents have in common: requests that are refused at once, events, commands, counters, trace
events.
"""
