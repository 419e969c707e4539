"""`zoo show`: one model's chain, block by block, and who shares each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table

if TYPE_CHECKING:
    from zoo.api import Block

#: Characters of a digest that people are shown.
_SHORT = 12


def show(
    name: Annotated[str, typer.Argument(help="The model's name, or a unique ending of it.")],
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the blocks of a model and the models that share them."""
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
                "chain": [_document(block) for block in chain],
            }
        )
        return
    print(f"{model.name}: {model.kind}{f' of {model.base}' if model.base else ''}, {model.family}, from {model.manifest.source}\n")
    print_table(("block", "layers", "components", "shared with"), [_row(block) for block in chain])


def _document(block: Block) -> dict[str, Any]:
    return {
        "block": block.digest,
        "layers": list(block.layers),
        "components": [
            {"kind": each.component.kind, "layer": each.layer, "digest": each.component.digest, "adapter": _adapter(each.component.adapter)}
            for each in block.components
        ],
        "shared_with": list(block.shared_with),
        "equivalents": [],
    }


def _adapter(adapter: Any) -> str | None:
    return None if adapter is None else str(adapter.kind)


def _row(block: Block) -> tuple[str, str, str, str]:
    lo, hi = block.layers
    layers = "" if lo == hi else str(lo) if hi == lo + 1 else f"{lo}-{hi - 1}"
    return (block.digest[:_SHORT], layers, _components(block), ", ".join(block.shared_with) or "nobody")


def _components(block: Block) -> str:
    """`embedding, 3 attention, 3 ffn`; parts with an adapter say so."""
    counts: dict[str, int] = {}
    for each in block.components:
        adapter = f" + {each.component.adapter.kind}" if each.component.adapter else ""
        counts[each.component.kind + adapter] = counts.get(each.component.kind + adapter, 0) + 1
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())
