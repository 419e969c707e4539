"""`zoo show`: print one model's chain, block by block, with the models that share each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table

if TYPE_CHECKING:
    from zoo.views.blocks import BlockView, Equivalent

#: Characters of a digest in printed text.
_SHORT = 12


def show(
    name: Annotated[str, typer.Argument(help="The model's name, or a unique ending of it.")],
    threshold: Annotated[
        float, typer.Option(help="Least similarity at which a scored block counts as equivalent.", min=0, max=1)
    ] = 0.98,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the blocks of a model, the models that share them, and what stands in for them (see `zoo compare`)."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        model = zoo.model(name)
        chain = model.chain
    if as_json:
        print_json(
            {
                "name": model.name,
                "kind": model.kind,
                "base": model.base,
                "family": model.family,
                "source": model.manifest.source,
                "chain": [_document(block, threshold) for block in chain],
            }
        )
        return
    print(
        f"{model.name}: {model.kind}{f' of {model.base}' if model.base else ''}, {model.family}, from "
        f"{model.manifest.source}\n"
    )
    print_table(
        ("block", "layers", "components", "shared with", "equivalents"), [_row(block, threshold) for block in chain]
    )


def _document(block: BlockView, threshold: float) -> dict[str, Any]:
    return {
        "block": block.digest,
        "layers": list(block.layers),
        "components": [
            {
                "kind": each.component.kind,
                "layer": each.layer,
                "digest": each.component.digest,
                "adapter": _adapter(each.component.adapter),
            }
            for each in block.components
        ],
        "shared_with": list(block.shared_with),
        "equivalents": [
            {"block": each.block, "model": each.model, "similarity": each.similarity, "blocks": list(each.blocks)}
            for each in _equivalents(block, threshold)
        ],
    }


def _equivalents(block: BlockView, threshold: float) -> list[Equivalent]:
    return [each for each in block.equivalents if each.similarity >= threshold]


def _adapter(adapter: Any) -> str | None:
    return None if adapter is None else str(adapter.kind)


def _row(block: BlockView, threshold: float) -> tuple[str, ...]:
    lo, hi = block.layers
    layers = "" if lo == hi else str(lo) if hi == lo + 1 else f"{lo}-{hi - 1}"
    alike = ", ".join(f"{each.model} {each.similarity:.3f}" for each in _equivalents(block, threshold))
    return (
        block.digest[:_SHORT],
        layers,
        _components(block),
        ", ".join(block.shared_with) or "no other model",
        alike or "none",
    )


def _components(block: BlockView) -> str:
    """Return a text such as `embedding, 3 attention, 3 ffn`; components with an adapter are marked."""
    counts: dict[str, int] = {}
    for each in block.components:
        adapter = f" + {each.component.adapter.kind}" if each.component.adapter else ""
        counts[each.component.kind + adapter] = counts.get(each.component.kind + adapter, 0) + 1
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())
