"""Exits of a model, which run only its first layers (BL-30): their names, and the chains that count as exits.

`surgery.chains.exits` makes them, requests choose them. A name alone does not prove an exit: the model may have been
replaced since, or another model may have been given such a name.
"""

from __future__ import annotations

from collections.abc import Iterable

from zoo.manifest import ModelManifest, Placed, digest_of

#: Separates a model's name from the number of layers that run.
EXIT = "@exit-"


def exit_name(model: str, layers: int) -> str:
    return f"{model}{EXIT}{layers}"


def exit_of(name: str) -> tuple[str, int] | None:
    """Return the model and the number of layers in an exit's name; None for any other name."""
    model, found, layers = name.rpartition(EXIT)
    return (model, int(layers)) if found and model and layers.isascii() and layers.isdigit() else None


def ends_of(manifest: ModelManifest) -> tuple[int, ...]:
    """Return, by number of layers from 0 on, the number of components up to the end of that layer."""
    ends: dict[int, int] = {0: 1}
    for at, placed in enumerate(manifest.components):
        if placed.layer is not None:
            ends[placed.layer + 1] = at + 1
    return tuple(ends[layers] for layers in range(len(ends)))


def stitch_behind(manifest: ModelManifest, end: int) -> int | None:
    """Return the index of the only stitch at or after component `end`; None for none or several.

    It converts the exit's output to the width of the head.
    """
    stitches = [at for at, placed in enumerate(manifest.components) if at >= end and placed.component.kind == "stitch"]
    return stitches[0] if len(stitches) == 1 else None


def chain_id(components: Iterable[Placed]) -> str:
    """Return the digest of the components that a chain runs, in order, adapters included."""
    return digest_of(["chain", [placed.component.digest for placed in components]])


def exit_ids(manifest: ModelManifest) -> tuple[frozenset[str], ...]:
    """Return, by number of layers, the `chain_id`s of the chains that are the model's exit there.

    An exit consists of the model's own components up to there and its head. There are two ids if a stitch follows,
    since it is inserted before the head if the head reads another width.
    """
    *body, head = manifest.components
    found: list[frozenset[str]] = []
    for end in ends_of(manifest):
        stitch = stitch_behind(manifest, end)
        ways = [(*body[:end], head), *([] if stitch is None else [(*body[:end], body[stitch], head)])]
        found.append(frozenset(map(chain_id, ways)))
    return tuple(found)


def is_exit(model: ModelManifest, other: ModelManifest) -> bool:
    """Return whether `other` is an exit of `model` as it is now, by its name and by the components that it runs."""
    named, ids = exit_of(other.name), exit_ids(model)
    return (
        named is not None
        and named[0] == model.name
        and named[1] < len(ids)
        and chain_id(other.components) in ids[named[1]]
    )
