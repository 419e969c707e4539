"""How exits are called: a model that is left behind so many of its layers (BL-30). Made by `surgery.exits`, chosen by requests."""

from __future__ import annotations

#: Between a model's name and the number of its layers that run.
EXIT = "@exit-"


def exit_name(model: str, layers: int) -> str:
    return f"{model}{EXIT}{layers}"


def exit_of(name: str) -> tuple[str, int] | None:
    """The model and the number of layers that an exit's name says; None for any other name."""
    model, found, layers = name.rpartition(EXIT)
    return (model, int(layers)) if found and model and layers.isascii() and layers.isdigit() else None
