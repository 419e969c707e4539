"""Code that several verbs use: declared options, values of options, the command class."""
