"""The version of a stored model, and the name that pins one: `<model>#<16 hex digits>`.

A name in the store may be reassigned to another model. Sequences that run on one version must not be given stages of
another, so what is loaded for a cluster is checked against the version in its name (UN-09). A name without a version is
not checked.
"""

from __future__ import annotations

import re

import torch

from zoo.errors import NotFound
from zoo.manifest import ModelManifest, digest_of

_DIGITS = 16
_PINNED = re.compile(rf"(?P<name>.+)#(?P<version>[0-9a-f]{{{_DIGITS}}})", re.DOTALL)


def version_of(manifest: ModelManifest, dtype: torch.dtype) -> str:
    """Return the digest of a model's components in order, adapters included, and of the dtype that they run in."""
    return digest_of(["chain", [placed.component.digest for placed in manifest.components], str(dtype)])


def pinned(name: str, version: str) -> str:
    """Return the name that pins one version of a model."""
    return f"{name}#{version[:_DIGITS]}"


def unpinned(name: str) -> tuple[str, str]:
    """Return a model's name and the first digits of its version; these are empty for a name without one."""
    found = _PINNED.fullmatch(name)
    return (name, "") if found is None else (found["name"], found["version"])


def check_version(manifest: ModelManifest, dtype: torch.dtype, wanted: str) -> None:
    """Raise NotFound if the model's version does not start with the digits `wanted`."""
    version = version_of(manifest, dtype)
    if not version.startswith(wanted):
        raise NotFound(
            f"the store has another version of {manifest.name} now: {wanted} is wanted, it is {version[:_DIGITS]}; "
            "keep the old one under a name of its own for as long as it is served"
        )
