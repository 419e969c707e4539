"""Constrain sequences to their grammars: masks of allowed tokens, computed on a thread of their own.

    opened, or a step's tokens read --prepare--> thread: grammar follows the tokens, next mask
    next step's logits              --allowed--> the mask, usually ready since the model's layers took longer

llguidance releases Python's lock while it works. A mask is a function of (grammar, output), so what the thread has
prepared is used only for the same output, and anything else is computed anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from runtime.grammars.compiled import CompiledGrammars
from runtime.grammars.state import GrammarState, TokenMask
from runtime.grammars.vocabulary import vocabulary_of
from runtime.types import ModelSpec, SamplingParams
from zoo.manifest import ModelManifest
from zoo.store import Store

#: The masks of one piece of work of the thread, and the place of one of them.
PreparedMask = tuple[Future[list["TokenMask | Exception"]], int]
#: Vocabularies of which compiled grammars are kept.
_VOCABULARIES = 8


class Constraint:
    """The constraint of one open sequence."""

    def __init__(self, state: Callable[[], GrammarState], thread: ThreadPoolExecutor) -> None:
        self._make, self._thread = state, thread
        self._state: GrammarState | None = None
        self._prepared: tuple[int, ...] = ()
        self._mask: PreparedMask | None = None

    def allowed(self, output: Sequence[int]) -> TokenMask:
        """Return which tokens may follow the output (`runtime.grammars.state`).

        Raises what reading a vocabulary raises.
        """
        tokens = tuple(output)
        if self._mask is None or self._prepared != tokens:
            prepare_masks([(self, tokens)])
        if self._mask is None:
            raise RuntimeError("the mask was not prepared")
        masks, place = self._mask
        found = masks.result()[place]
        if isinstance(found, Exception):
            raise found
        return found

    def _compute(self, output: tuple[int, ...]) -> TokenMask:
        if self._state is None:
            self._state = self._make()
        return self._state.allowed(output)


def prepare_masks(wanted: Sequence[tuple[Constraint, Sequence[int]]]) -> None:
    """Begin the masks behind outputs on the constraints' threads, in the order of the calls.

    A thread gets all of a call in one piece: passing one on takes as long as computing a mask.
    """
    pieces: dict[ThreadPoolExecutor, list[tuple[Constraint, tuple[int, ...]]]] = {}
    for constraint, output in wanted:
        pieces.setdefault(constraint._thread, []).append((constraint, tuple(output)))
    for thread, piece in pieces.items():
        masks = thread.submit(_compute_masks, piece)
        for place, (constraint, tokens) in enumerate(piece):
            constraint._prepared, constraint._mask = tokens, (masks, place)


def _compute_masks(piece: Sequence[tuple[Constraint, tuple[int, ...]]]) -> list[TokenMask | Exception]:
    """Return the masks; an error in place of one is that sequence's own."""
    out: list[TokenMask | Exception] = []
    for constraint, output in piece:
        try:
            out.append(constraint._compute(output))
        except Exception as error:  # raised where the mask is read
            out.append(error)
    return out


class Constraints:
    """The constraints of a device's sequences, and the grammars compiled for its models' vocabularies."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._grammars: dict[object, CompiledGrammars] = {}
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def open(self, manifest: ModelManifest, spec: ModelSpec, sampling: SamplingParams) -> Constraint | None:
        """Return the constraint of a sequence, None for one without a grammar."""
        if not sampling.grammar:
            return None
        # One thread: a sequence's masks are computed in order, and no step waits for more than one mask per row.
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="zoo-masks")
        grammar, ends = sampling.grammar, spec.eos_token_ids
        return Constraint(
            lambda: GrammarState(self._compiled(manifest, spec), grammar, spec.vocab_size, ends), self._thread
        )

    def _compiled(self, manifest: ModelManifest, spec: ModelSpec) -> CompiledGrammars:
        from runtime.frontend.stored_tokenizer import config_of, stored_tokenizer, tokenizer_files_of
        from zoo.handle import ModelHandle

        handle = ModelHandle(self._store, manifest)
        files = tuple(tokenizer_files_of(handle))
        key = (files, str(config_of(handle).get("model_type")), spec.vocab_size, spec.eos_token_ids)
        with self._lock:
            if key not in self._grammars:
                vocabulary = vocabulary_of(stored_tokenizer(handle), spec.vocab_size, spec.eos_token_ids)
                while len(self._grammars) >= _VOCABULARIES:
                    del self._grammars[next(iter(self._grammars))]
                self._grammars[key] = CompiledGrammars(vocabulary)
            return self._grammars[key]
