"""Generate pages of the documentation: `python -m cli.docs` writes them into docs/."""
