"""The main loop of an agent: messages in, steps and commands carried out, messages out."""
