"""JSON documents that several verbs or routes print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.catalog import ModelSummary
    from zoo.records import AliasChange


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


def targets_text(change: AliasChange) -> str:
    """Return the models that an alias points to, with their shares if there are several."""
    if len(change.targets) == 1:
        return change.targets[0].model
    return ", ".join(f"{target.model} {target.share} %" for target in change.targets)
