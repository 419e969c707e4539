"""Run any mixture of the layers of several models of one shape; common beginnings of mixtures run once per batch.

Nothing is copied or changed: a mixture is a sequence of the models' own components, and components with the same digest
count as one, in whichever model they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.chains.plan import CHAIN
from surgery.experiments.points import PRUNED, SECOND, Mixture
from surgery.modules.splice import splice
from surgery.modules.stack import Stack, open_stack
from zoo.errors import InputError
from zoo.manifest import ModelManifest
from zoo.store import Store


@dataclass(frozen=True, slots=True)
class MixturePiece:
    """Components [lo, hi) of a source."""

    source: str
    lo: int
    hi: int


class MixtureBench:
    """The models of a bench. Sources: `a`, `b`, and one per surrogate with pruned stand-ins (`s0`, `s1`, …)."""

    def __init__(self, stacks: Mapping[str, Stack]) -> None:
        """Use `open_bench`. Raises InputError if the stacks have different shapes."""
        self.stacks = dict(stacks)
        self._spans = {source: _layer_spans(stack, source) for source, stack in self.stacks.items()}
        self._check_shapes()
        self.pruned_by = self._stand_ins()
        self._same = self._equal_pieces()

    @property
    def layers(self) -> int:
        return len(self._spans[SECOND])

    @property
    def replaceable(self) -> str:
        """One letter per layer: `s` if a stand-in exists, `b` otherwise; empty if there is none at all."""
        return (
            "".join(PRUNED if layer in self.pruned_by else SECOND for layer in range(self.layers))
            if self.pruned_by
            else ""
        )

    def pieces(self, mixture: Mixture) -> tuple[MixturePiece, ...]:
        """Return the pieces that the mixture runs, in order: embedding, layers, head.

        Mixtures with the same pieces are the same model.
        """
        end = self.stacks[mixture.ends].end
        found = [MixturePiece(mixture.ends, 0, 1)]
        for layer, letter in enumerate(mixture.layers):
            source = self.pruned_by[layer] if letter == PRUNED else letter
            found.append(self._place(source, layer))
        return tuple(self._same.get(piece, piece) for piece in (*found, MixturePiece(mixture.ends, end, end + 1)))

    def run(self, mixtures: Sequence[Mixture], ids: Tensor) -> Iterator[tuple[list[Mixture], Tensor]]:
        """Yield hidden states before the head, [B, T, width], each with the mixtures that have these pieces.

        Common beginnings run once.
        """
        courses = {source: stack.course(ids) for source, stack in self.stacks.items()}
        yield from self._walk([(mixture, self.pieces(mixture)) for mixture in mixtures], 0, ids, courses)

    def head(self, mixture: Mixture, hidden: Tensor) -> Tensor:
        """Compute hidden states [.., width] -> logits [.., vocabulary] by the mixture's own norm and head."""
        return self.stacks[mixture.ends].head(hidden)

    def stack(self, mixture: Mixture) -> Stack:
        """Return the mixture as one stack, which shares the models' modules."""
        return splice(
            [
                (self.stacks[piece.source], index)
                for piece in self.pieces(mixture)
                for index in range(piece.lo, piece.hi)
            ]
        )

    def _walk(
        self,
        mixtures: Sequence[tuple[Mixture, tuple[MixturePiece, ...]]],
        depth: int,
        x: Tensor,
        courses: Mapping[str, Any],
    ) -> Iterator[tuple[list[Mixture], Tensor]]:
        branches: dict[MixturePiece, list[tuple[Mixture, tuple[MixturePiece, ...]]]] = {}
        for mixture, pieces in mixtures:
            branches.setdefault(pieces[depth], []).append((mixture, pieces))
        for piece, members in branches.items():
            if depth > self.layers:
                yield [mixture for mixture, _ in members], x
            else:
                after = self.stacks[piece.source].run(x, courses[piece.source], piece.lo, piece.hi)
                yield from self._walk(members, depth + 1, after, courses)

    def _check_shapes(self) -> None:
        b = self.stacks[SECOND]
        for source, stack in self.stacks.items():
            depth, width = len(self._spans[source]), _width(stack)
            if depth != self.layers:
                raise InputError(
                    f"model {source} has {depth} layers and b {self.layers}: layers cannot be exchanged one for one"
                )
            if width != _width(b):
                raise InputError(
                    f"model {source} is {width} wide and b {_width(b)}: their layers need a stitch between them"
                )
            if _families(stack) != _families(b):
                raise InputError(
                    f"model {source} is of another family than b: {', '.join(_families(stack))} and "
                    f"{', '.join(_families(b))}"
                )

    def _stand_ins(self) -> dict[int, str]:
        """Return layer -> the first pruned source with a layer that is not b's own."""
        found: dict[int, str] = {}
        for source in self.stacks:
            if source.startswith(PRUNED):
                for layer in range(self.layers):
                    if self._digests(self._place(source, layer)) != self._digests(self._place(SECOND, layer)):
                        found.setdefault(layer, source)
        return found

    def _equal_pieces(self) -> dict[MixturePiece, MixturePiece]:
        """Return piece -> the first source's piece with the same components."""
        order = sorted(self.stacks, key=lambda source: source != SECOND)
        places = [MixturePiece(source, 0, 1) for source in order]
        places += [MixturePiece(source, self.stacks[source].end, self.stacks[source].end + 1) for source in order]
        places += [self._place(source, layer) for layer in range(self.layers) for source in order]
        first: dict[tuple[str, ...], MixturePiece] = {}
        return {piece: first.setdefault(self._digests(piece), piece) for piece in places}

    def _place(self, source: str, layer: int) -> MixturePiece:
        return MixturePiece(source, *self._spans[source][layer])

    def _digests(self, piece: MixturePiece) -> tuple[str, ...]:
        return tuple(placed.component.digest for placed in self.stacks[piece.source].placed[piece.lo : piece.hi])


def open_bench(
    store: Store,
    a: ModelManifest,
    b: ModelManifest,
    surrogates: Sequence[ModelManifest],
    device: str = "cpu",
    dtype: str | None = None,
) -> MixtureBench:
    """Open the models of a bench.

    Args:
        surrogates: Whole chains of b's depth in which some layers are pruned stand-ins for b's.

    Raises:
        InputError: The depths, widths or families differ, or a surrogate has no layer that is not b's own.
        DamagedObject, NotServable: As for opening a stack.
    """
    named = {"a": a, "b": b, **{f"{PRUNED}{index}": manifest for index, manifest in enumerate(surrogates)}}
    bench = MixtureBench({source: open_stack(store, manifest, device, dtype) for source, manifest in named.items()})
    for source, manifest in named.items():
        if source.startswith(PRUNED) and source not in bench.pruned_by.values():
            raise InputError(f"{manifest.name} stands in for no layer of {b.name} that another surrogate does not")
    return bench


def _layer_spans(stack: Stack, source: str) -> list[tuple[int, int]]:
    """Return layer -> its components [lo, hi).

    Raises InputError for a chain that is not embedding, layers 0, 1, …, head.
    """
    spans: list[tuple[int, int]] = []
    for index, placed in enumerate(stack.placed[1 : stack.end], 1):
        if placed.layer == len(spans):
            spans.append((index, index + 1))
        elif spans and placed.layer == len(spans) - 1:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            raise InputError(
                f"the chain of model {source} is not its layers one after another (it has a {placed.component.kind} "
                "between)"
            )
    return spans


def _families(stack: Stack) -> list[str]:
    return sorted({placed.component.family for placed in stack.placed})


def _width(stack: Stack) -> int:
    """Return the width of the hidden states after the embedding."""
    ids = torch.zeros((1, 1), dtype=torch.int64, device=stack.device)
    with torch.inference_mode():
        return int(stack.run(ids, stack.course(ids), 0, 1).shape[-1])


def mixed_model(bench: MixtureBench, mixture: Mixture) -> Any:
    """Return the mixture as a `PreTrainedModel` for lm-eval. It shares the bench's modules."""
    from surgery.chains.hf_model import BlockZooChainForCausalLM

    config = bench.stacks[mixture.ends].configs[0].to_dict()
    kept = (
        "vocab_size",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "num_hidden_layers",
        "hidden_size",
    )
    settings = {"model_type": CHAIN, **{key: config[key] for key in kept if key in config}}
    return BlockZooChainForCausalLM.from_stack(settings, bench.stack(mixture))
