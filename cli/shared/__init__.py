"""Code that several verbs use: option declarations, option values, the command class."""
