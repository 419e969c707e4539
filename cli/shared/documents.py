"""JSON documents that several verbs or routes print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.catalog import ModelSummary


def model_document(model: ModelSummary) -> dict[str, Any]:
    """Return a stored model for `zoo ls --json` and `/zoo/models`; sizes in bytes."""
    return {
        "name": model.name,
        "kind": model.kind,
        "base": model.base,
        "family": model.family,
        "params": model.params,
        "blocks": model.blocks,
        "bytes": model.bytes,
        "bytes_own": model.bytes_own,
        "source": model.source,
        "created": model.created.isoformat(),
    }
