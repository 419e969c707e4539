"""Constrain sequences to their grammars: masks of allowed tokens, computed on a thread of their own.

    opened, or a step's tokens read --prepare--> thread: grammar follows the tokens, next mask
    next step's logits              --allowed--> the mask, usually ready since the model's layers took longer

A repeated decode step starts the work only with its layers. Before that both threads need Python's lock, and a thread
that releases and takes it for each mask gets it again before the other one wakes: the step would wait for all masks.

llguidance releases Python's lock while it compiles and computes masks. A mask is a function of (grammar, output). The
thread is told what changes of an output, not the whole of it, so that a token costs the same in long answers; what it
has prepared is used only for the same number of tokens, and anything else is computed anew.

A first mask may take long: the vocabulary is read, the grammar compiled. So it has a thread of its own, and the other
rows of a step need not wait for it (`ready_within`). Later masks take less than a step, but for a few grammars: once a
mask has been slow, those that follow are treated like it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from runtime.grammars.compiled import CompiledGrammars
from runtime.grammars.state import GrammarState, TokenMask
from runtime.grammars.vocabulary import vocabulary_of
from runtime.types import ModelSpec, SamplingParams
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Vocabularies of which compiled grammars are kept.
_VOCABULARIES = 8
#: Seconds of the processor from which on a mask is slow. Most take less than .0001.
SLOW = 0.02


class MaskWork:
    """Masks that a thread computes in one piece: passing one on takes as long as computing a mask."""

    def __init__(self, thread: ThreadPoolExecutor, wanted: Sequence[tuple[Constraint, int, tuple[int, ...]]]) -> None:
        self._thread, self._wanted = thread, wanted
        self._masks: Future[list[TokenMask | Exception]] | None = None

    @property
    def is_started(self) -> bool:
        return self._masks is not None

    @property
    def is_done(self) -> bool:
        return self._masks is not None and self._masks.done()

    def start(self) -> Future[list[TokenMask | Exception]]:
        """Begin, if that has not been done."""
        if self._masks is None:
            self._masks, self._wanted = self._thread.submit(_compute_masks, self._wanted), ()
        return self._masks


#: A piece of work, and the place of one of its masks.
PreparedMask = tuple[MaskWork, int]


class Constraint:
    """The constraint of one open sequence.

    Args:
        opening: The thread of its first mask, and of slow ones.
        thread: That of the later ones.

    Attributes:
        late: Whether a step went on without its mask (`ready_within`).
        slow: Whether one of its masks was slow.
    """

    def __init__(
        self, state: Callable[[], GrammarState], opening: ThreadPoolExecutor, thread: ThreadPoolExecutor
    ) -> None:
        self._make, self._opening, self._later = state, opening, thread
        self._state: GrammarState | None = None
        self._prepared = 0
        self._mask: PreparedMask | None = None
        self._open = self.late = self.slow = False

    @property
    def is_ready(self) -> bool:
        """Whether its next mask is there, or takes less than a step."""
        if self._open and not self.slow:
            return True
        done = self._mask is not None and self._mask[0].is_done
        self._open |= done
        return done

    @property
    def _thread(self) -> ThreadPoolExecutor:
        return self._later if self.is_ready and not self.slow else self._opening

    def allowed(self, count: int) -> TokenMask:
        """Return which tokens may follow the first `count` ones of the output (`runtime.grammars.state`).

        Raises what reading a vocabulary raises.
        """
        if self._mask is None or self._prepared != count:
            prepare_masks([(self, count, ())])
        if self._mask is None:
            raise RuntimeError("the mask was not prepared")
        work, place = self._mask
        found = work.start().result()[place]
        if isinstance(found, Exception):
            raise found
        return found

    def _compute(self, kept: int, new: Sequence[int]) -> TokenMask:
        if self._state is None:
            self._state = self._make()
        begin = time.thread_time()
        mask = self._state.allowed(kept, new, self.slow)
        self.slow = self.slow or time.thread_time() - begin > SLOW
        return mask


def ready_within(constraints: Sequence[Constraint], seconds: float) -> None:
    """Wait until all are ready, but at most so long; mark the rest as `late`."""
    wanted = [each._mask[0] for each in constraints if each._mask is not None and not each.is_ready]
    wait([work.start() for work in wanted], timeout=seconds)
    for each in constraints:
        each.late = not each.is_ready


def prepare_masks(
    wanted: Sequence[tuple[Constraint, int, Sequence[int]]], deferred: bool = False
) -> Sequence[MaskWork]:
    """Begin the next masks on the constraints' threads, in the order of the calls: behind so many tokens of the output,
    and the new ones that follow them.

    A thread gets all of a call in one piece. `deferred`: work that takes less than a step is not started yet, but
    returned. It starts by itself where one of its masks is read, or is followed by another one.
    """
    pieces: dict[ThreadPoolExecutor, list[tuple[Constraint, int, tuple[int, ...]]]] = {}
    for constraint, kept, new in wanted:
        if constraint._mask is not None:
            constraint._mask[0].start()  # the grammar follows all tokens
        pieces.setdefault(constraint._thread, []).append((constraint, kept, tuple(new)))
    waiting = []
    for thread, piece in pieces.items():
        work = MaskWork(thread, piece)
        if deferred and thread is piece[0][0]._later and thread is not piece[0][0]._opening:
            waiting.append(work)
        else:
            work.start()
        for place, (constraint, kept, new) in enumerate(piece):
            constraint._prepared, constraint._mask = kept + len(new), (work, place)
    return waiting


def _compute_masks(piece: Sequence[tuple[Constraint, int, Sequence[int]]]) -> list[TokenMask | Exception]:
    """Return the masks; an error in place of one is that sequence's own."""
    out: list[TokenMask | Exception] = []
    for constraint, kept, new in piece:
        try:
            out.append(constraint._compute(kept, new))
        except Exception as error:  # raised where the mask is read
            out.append(error)
    return out


class Constraints:
    """The constraints of a device's sequences, and the grammars compiled for its models' vocabularies."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._grammars: dict[object, CompiledGrammars] = {}
        self._lock = threading.Lock()
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None

    def open(self, manifest: ModelManifest, spec: ModelSpec, sampling: SamplingParams) -> Constraint | None:
        """Return the constraint of a sequence, None for one without a grammar."""
        if not sampling.grammar:
            return None
        # One thread each: a sequence's masks are computed in order, and no step waits for more than one mask per row.
        self._threads = self._threads or (
            ThreadPoolExecutor(1, thread_name_prefix="zoo-grammars"),
            ThreadPoolExecutor(1, thread_name_prefix="zoo-masks"),
        )
        grammar, ends = sampling.grammar, spec.eos_token_ids
        return Constraint(
            lambda: GrammarState(self._compiled(manifest, spec), grammar, spec.vocab_size, ends), *self._threads
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
