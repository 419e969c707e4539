"""The main loop of an agent: receive messages, carry out steps and commands, send messages."""
