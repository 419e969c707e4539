"""Plot a family: which model each component's weights come from, and what storing them takes.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish; adapters are marked by hatching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.demo.sharing import Cell, Shared, Sharing
from cli.shared.output import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#999999")
_INK = "#222222"
_CAPTION = "equal colours in a column are the same weights;  =  marks those that were there already and are used again"
_CAPTION_DENSE = "equal colours in a column are the same weights, stored once; each layer is attention and FFN"
#: Above so many layers there is no room for a label per component and a sign per cell.
_LABELLED = 12
#: Then one label for so many layers.
_EVERY = 5
_SHORT = {"embedding": "embed", "attention": "attn", "ffn": "ffn", "layer": "layer", "lm_head": "head"}


def plot_blocks(sharing: Sharing, path: Path) -> None:
    """Write the map of blocks: a row per model, a column per component, one colour per owner of the weights."""
    figure = _figure(12.5, 2.15 + 0.62 * len(sharing.models))
    axes = figure.add_subplot()
    layers = max(_layers(model) for model in sharing.models)
    colours = owner_colours(sharing)
    dense = layers > _LABELLED
    for row, model in enumerate(sharing.models):
        _draw_row(axes, row, model, layers, colours, signs=not dense)
    _name_columns(axes, sharing.models, layers, sparse=dense)
    _name_rows(axes, sharing.models)
    axes.set_title(
        "The weights that each model computes with", loc="left", fontsize=13, fontweight="bold", color=_INK, pad=52
    )
    axes.text(0.0, -1.16, _CAPTION_DENSE if dense else _CAPTION, fontsize=9.5, color=_INK)
    handles = [_patch(colour, f"weights of {owner}") for owner, colour in colours.items()]
    if any(cell.adapted for model in sharing.models for cell in model.cells):
        handles.append(_patch("#FFFFFF", "with an adapter on top (its own small tensors)", hatch="////", edge=_INK))
    _legend(figure, handles)
    _save(figure, path)


def plot_storage(sharing: Sharing, path: Path) -> None:
    """Write three bars, each stacked by model: complete copies, original files, the store."""
    figure = _figure(10.5, 4.4)
    axes = figure.add_subplot()
    bars = {
        "one complete copy\nper model": [model.complete for model in sharing.models],
        "checkpoint files\nas they came": [model.files for model in sharing.models],
        "in the zoo": [model.added for model in sharing.models],
    }
    for row, sizes in enumerate(bars.values()):
        _draw_bar(axes, row, sizes)
        axes.text(
            sum(sizes) / 1e6,
            row,
            f"  {human_bytes(sum(sizes))}",
            va="center",
            fontsize=11,
            fontweight="bold",
            color=_INK,
        )
    axes.set_yticks(range(len(bars)), list(bars), fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, sharing.complete / 1e6 * 1.13)
    axes.set_xlabel("MB of weights", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"Storing {len(sharing.models)} models: {1 - sharing.stored / sharing.complete:.0%} less than complete copies",
        loc="left", fontsize=13, fontweight="bold", color=_INK, pad=12,
    )  # fmt: skip
    _legend(figure, [_patch(_colour(index), model.name) for index, model in enumerate(sharing.models)])
    _save(figure, path)


def owner_colours(sharing: Sharing) -> dict[str, str]:
    """Return a colour for every model that owns a component, the same as in the bars."""
    owners = {cell.owner for model in sharing.models for cell in model.cells}
    return {model.name: _colour(index) for index, model in enumerate(sharing.models) if model.name in owners}


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _layers(model: Shared) -> int:
    return 1 + max((cell.layer for cell in model.cells if cell.layer is not None), default=-1)


def _column(cell: Cell, layers: int) -> float:
    """Return a component's x position.

    The embedding is at the left, then two columns per layer with a gap between layers, then the head.
    """
    if cell.layer is None:
        return 0.0 if cell.kind == "embedding" else 1.4 + layers * 2.25 + 0.15
    return 1.4 + cell.layer * 2.25 + (1.0 if cell.kind == "ffn" else 0.0)


def _draw_row(axes: Axes, row: int, model: Shared, layers: int, colours: Mapping[str, str], *, signs: bool) -> None:
    from matplotlib.patches import Rectangle

    for cell in model.cells:
        width = 2.0 if cell.kind == "layer" else 1.0
        place = (_column(cell, layers), row - 0.36)
        axes.add_patch(Rectangle(place, width, 0.72, facecolor=colours[cell.owner], edgecolor="white", linewidth=1.5))
        if cell.adapted:
            axes.add_patch(Rectangle(place, width, 0.72, fill=False, hatch="////", edgecolor="white", linewidth=0))
        if signs and cell.owner != model.name:
            box = {"facecolor": colours[cell.owner], "edgecolor": "none", "pad": 1.0}
            axes.text(
                place[0] + width / 2,
                row,
                "=",
                ha="center",
                va="center",
                color="white",
                fontsize=11,
                fontweight="bold",
                bbox=box,
            )


def _name_columns(axes: Axes, models: Sequence[Shared], layers: int, *, sparse: bool) -> None:
    widest = max(models, key=_layers)
    for cell in widest.cells:
        if sparse and cell.layer is not None:
            continue
        width = 2.0 if cell.kind == "layer" else 1.0
        axes.text(
            _column(cell, layers) + width / 2,
            -0.48,
            _SHORT[cell.kind],
            ha="center",
            va="bottom",
            fontsize=8,
            color="#555555",
        )
    for layer in range(0, layers, _EVERY if sparse else 1):
        axes.text(1.4 + layer * 2.25 + 1.0, -0.78, f"layer {layer}", ha="center", va="bottom", fontsize=9, color=_INK)
    axes.set_xlim(-0.15, 1.4 + layers * 2.25 + 1.3)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.set_xticks([])


def _name_rows(axes: Axes, models: Sequence[Shared]) -> None:
    labels = [f"{model.name}\n{_kind(model)}, {model.blocks} block{'s' * (model.blocks != 1)}" for model in models]
    axes.set_yticks(range(len(models)), labels, fontsize=9.5, color=_INK)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _kind(model: Shared) -> str:
    return {"full": "full fine-tune", "lora": "LoRA", "delta": "low-rank delta"}.get(model.kind, model.kind)


def _draw_bar(axes: Axes, row: int, sizes: Sequence[int]) -> None:
    left = 0.0
    for index, size in enumerate(sizes):
        axes.barh(row, size / 1e6, left=left, height=0.56, color=_colour(index), edgecolor="white", linewidth=1.0)
        left += size / 1e6


def _figure(width: float, height: float) -> Figure:
    """Return a figure that needs neither a display nor matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _patch(colour: str, label: str, **style: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label, hatch=style.get("hatch"), edgecolor=style.get("edge", colour))


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(handles=list(handles), loc="outside lower left", ncols=3, frameon=False, fontsize=9.5)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
