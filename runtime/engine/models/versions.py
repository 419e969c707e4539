"""Which version of a stored model a chain is made of, and the name under which engines find just that: `<model>#<16 hex
digits>`.

A name in the store may come to hold another model. Who runs on a version must not be given parts of another one, so
what is loaded for a cluster is checked against the version in its name (UN-09). A name without one is taken as it
stands.
"""

from __future__ import annotations

import re

import torch

from zoo.errors import NotFound
from zoo.manifest import ModelManifest, digest_of

_DIGITS = 16
_PINNED = re.compile(rf"(?P<name>.+)#(?P<version>[0-9a-f]{{{_DIGITS}}})", re.DOTALL)


def version_of(manifest: ModelManifest, dtype: torch.dtype) -> str:
    """Names a model's components in order, adapters included, in the dtype that they run in."""
    return digest_of(["chain", [placed.component.digest for placed in manifest.components], str(dtype)])


def pinned(name: str, version: str) -> str:
    """A name for one version of a model."""
    return f"{name}#{version[:_DIGITS]}"


def unpinned(name: str) -> tuple[str, str]:
    """A model's name and the first digits of its version, which are empty for a name without one."""
    found = _PINNED.fullmatch(name)
    return (name, "") if found is None else (found["name"], found["version"])


def check_version(manifest: ModelManifest, dtype: torch.dtype, wanted: str) -> None:
    """Raises NotFound if a model is not of the version whose first digits are `wanted`."""
    version = version_of(manifest, dtype)
    if not version.startswith(wanted):
        raise NotFound(
            f"the store has another version of {manifest.name} now: {wanted} is wanted, it is {version[:_DIGITS]}; "
            "keep the old one under a name of its own for as long as it is served"
        )
