"""Exits of a model, which is left behind so many of its layers (BL-30): how they are called, and which chains they are.

Made by `surgery.chains.exits`, chosen by requests. A name alone says nothing: a model may have been replaced since, or
a stranger called so.
"""

from __future__ import annotations

from collections.abc import Iterable

from zoo.manifest import ModelManifest, Placed, digest_of

#: Between a model's name and the number of its layers that run.
EXIT = "@exit-"


def exit_name(model: str, layers: int) -> str:
    return f"{model}{EXIT}{layers}"


def exit_of(name: str) -> tuple[str, int] | None:
    """The model and the number of layers that an exit's name says; None for any other name."""
    model, found, layers = name.rpartition(EXIT)
    return (model, int(layers)) if found and model and layers.isascii() and layers.isdigit() else None


def ends_of(manifest: ModelManifest) -> tuple[int, ...]:
    """By number of layers, from 0 on: the component behind which they have run."""
    ends: dict[int, int] = {0: 1}
    for at, placed in enumerate(manifest.components):
        if placed.layer is not None:
            ends[placed.layer + 1] = at + 1
    return tuple(ends[layers] for layers in range(len(ends)))


def stitch_behind(manifest: ModelManifest, end: int) -> int | None:
    """The only stitch behind a component, which makes what comes out there as wide as the head; None for none, or
    several.
    """
    stitches = [at for at, placed in enumerate(manifest.components) if at >= end and placed.component.kind == "stitch"]
    return stitches[0] if len(stitches) == 1 else None


def chain_id(components: Iterable[Placed]) -> str:
    """Which components a chain runs, in order, adapters included."""
    return digest_of(["chain", [placed.component.digest for placed in components]])


def exit_ids(manifest: ModelManifest) -> tuple[frozenset[str], ...]:
    """By number of layers: what chains its exit there may be (`chain_id`): its own components up to there, and its
    head.

    Two where a stitch is behind, for it stands before the head where that reads another width.
    """
    *body, head = manifest.components
    found: list[frozenset[str]] = []
    for end in ends_of(manifest):
        stitch = stitch_behind(manifest, end)
        ways = [(*body[:end], head), *([] if stitch is None else [(*body[:end], body[stitch], head)])]
        found.append(frozenset(map(chain_id, ways)))
    return tuple(found)


def is_exit(model: ModelManifest, other: ModelManifest) -> bool:
    """Whether that is an exit of a model as it is now, by name and by what it runs."""
    named, ids = exit_of(other.name), exit_ids(model)
    return (
        named is not None
        and named[0] == model.name
        and named[1] < len(ids)
        and chain_id(other.components) in ids[named[1]]
    )
